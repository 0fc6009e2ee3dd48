"""The files of examples/kubernetes are what Kubernetes and the MPI Operator take.

Job, volume and both pod templates of the MPIJob are checked against Kubernetes' published schemas, with
no unknown field allowed; the package kubernetes-validate brings them. No package brings the schema of
the MPIJob itself: its own fields, all outside the pod templates, are checked against the table below,
which says what the operator's definition of mpijobs.kubeflow.org, v2beta1, allows.
"""

from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from support.documents import ROOT

from hvdtrain.cli import cli

FOLDER = ROOT / "examples" / "kubernetes"
FILES = ("job.yaml", "mpijob.yaml", "runs.yaml")
ELASTIC = "../elastic/mpijob.yaml"
KUBERNETES = "1.31"
REPLICAS = ("Launcher", "Worker")


def mapping(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """Give the schema of a mapping with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


NUMBER, TEXT, SWITCH, ANYTHING = ({"type": kind} for kind in ("integer", "string", "boolean", "object"))
REPLICA = mapping(
    ("template",), replicas=NUMBER, restartPolicy={"enum": ["Never", "OnFailure"]}, template=ANYTHING
)
MPIJOB = mapping(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=ANYTHING,
    spec=mapping(
        ("mpiReplicaSpecs",),
        slotsPerWorker=NUMBER,
        runLauncherAsWorker=SWITCH,
        sshAuthMountPath=TEXT,
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        runPolicy=mapping(
            cleanPodPolicy={"enum": ["None", "Running", "All"]},
            ttlSecondsAfterFinished=NUMBER,
            activeDeadlineSeconds=NUMBER,
            backoffLimit=NUMBER,
            suspend=SWITCH,
            managedBy=TEXT,
            schedulingPolicy=ANYTHING,
        ),
        mpiReplicaSpecs=mapping(REPLICAS, **dict.fromkeys(REPLICAS, REPLICA)),
    ),
)


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def check(resource: dict[str, Any]) -> None:
    """Check a resource, of an MPIJob all parts that packages have schemas for."""
    if resource["kind"] != "MPIJob":
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        return
    jsonschema.validate(resource, MPIJOB)
    named = {"apiVersion": "v1", "metadata": {"name": "one"}}
    kubernetes_validate.validate(
        {**named, "kind": "ConfigMap", "metadata": resource["metadata"]}, KUBERNETES, strict=True
    )
    for replica in resource["spec"]["mpiReplicaSpecs"].values():
        template = {**named, "kind": "PodTemplate", "template": replica["template"]}
        kubernetes_validate.validate(template, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", [*FILES, ELASTIC])
def test_file_is_valid(name):
    check(read(name))


def started(name: str) -> tuple[list[str], dict[str, Any]]:
    """Return the launcher's words in the first container of a file, and the spec; the job resumes."""
    spec = read(name)["spec"]
    pod = spec["mpiReplicaSpecs"]["Launcher"] if "mpijob" in name else spec
    words = pod["template"]["spec"]["containers"][0]["args"]
    start = words.index("python")
    assert words[start : start + 3] == ["python", "-m", "hvdtrain"]
    options = cli.commands["train"].make_context("train", words[start + 3 :], **cli.context_settings).params
    assert options["resume"]
    return words[:start], spec


@pytest.mark.parametrize("name", ["job.yaml", "mpijob.yaml"])
def test_the_command_starts_as_many_workers_as_there_are_places(name):
    launcher, spec = started(name)
    places = 2
    if name == "mpijob.yaml":
        places = spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
        assert launcher[0] == "head"
        assert launcher[-2:] == ["--hostfile", "/etc/mpi/hostfile"]  # where the operator writes it
    assert launcher[launcher.index("-np") + 1] == str(places)


def test_the_elastic_job_starts_with_the_workers_that_the_operator_makes():
    launcher, spec = started(ELASTIC)
    given = dict(zip(launcher[2::2], launcher[3::2], strict=True))
    assert launcher[:2] == ["head", "horovodrun"]
    assert given["--host-discovery-script"] == "/etc/mpi/discover_hosts.sh"  # where the operator writes it
    assert given["--slots-per-host"] == str(spec["slotsPerWorker"])
    workers = spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert int(given["--min-np"]) <= int(given["-np"]) == workers <= int(given["--max-np"])
