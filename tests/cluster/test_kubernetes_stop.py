"""What a worker's pod does before it ends: all workers stop at a step, and save."""

import json
import os
from pathlib import Path

import pytest
import yaml
from support.documents import ROOT
from support.jobs import LIMIT_SECONDS, started
from support.resuming import command_for as training
from support.resuming import last_step

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="a pod's process numbers (unshare --pid) need root")
# The pod: `kubelet` runs the hook when the file is there, and the pod has ended when both have
POD = """\
$COMMAND & job=$!
until [ -e stop ]; do sleep 0.1; done
sh -c "$HOOK"; echo "hook: $?"
wait $job; echo "job: $?"
"""


def hook() -> str:
    """Give the shell script of the workers' preStop hook."""
    job = yaml.safe_load((ROOT / "examples" / "kubernetes" / "mpijob.yaml").read_text(encoding="utf-8"))
    (container,) = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    shell, option, script = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("sh", "-c")
    return script


def pod(folder: Path, *words: str, **environ: str) -> started:
    """Start words where they and the hook see no other processes of this machine."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", POD]
    return started(command, folder, COMMAND=" ".join(words), HOOK=hook(), **environ)


def test_the_hook_stops_the_workers_with_a_checkpoint(tmp_path):
    command = training(2, "mpirun", "Fit", "--framework", "torch", "--steps", "2000", "--save-every", "5000")
    with pod(tmp_path, *command, HVDTRAIN_TEST_SAMPLE_SECONDS="0.01") as job:
        job.until(lambda: last_step(tmp_path) >= 3)
        (tmp_path / "stop").touch()
        result = job.wait(LIMIT_SECONDS)
    assert "hook: 0\n" in result.stdout
    assert "job: 75\n" in result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("stopped", "SIGUSR2 came")
    assert (tmp_path / summary["checkpoint"]).is_dir()


def test_the_hook_ends_where_no_worker_runs(tmp_path):
    with pod(tmp_path, "true") as job:
        (tmp_path / "stop").touch()
        result = job.wait(LIMIT_SECONDS)
    assert "hook: 0\njob: 0\n" in result.stdout
