"""Three hosts with 2, 1 and 1 workers train to the curve of one worker."""

import numpy as np
import pytest
from cluster_jobs import launcher, train
from hosts import Cluster
from support.jobs import CONTROLLERS, temporary_folder
from support.jobs import train as train_here

STEPS, TOLERANCE = 50, 1e-4  # the tolerance of the design's promise
OPTIONS = ("--steps", str(STEPS), "--log-every", "1", "--global-batch-size", "48")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster({"h1": 2, "h2": 1, "h3": 1}, shared=tmp_path_factory.mktemp("shared")) as cluster:
        yield cluster


# Each controller and each framework once; test_image_cluster.py trains with the other two pairs
@pytest.mark.parametrize(("controller", "framework"), [("mpi", "torch"), ("gloo", "tf")])
def test_three_hosts_draw_the_curve_of_one_worker(controller, framework, cluster, tmp_path_factory):
    """The plan names the hosts, and the run is written once."""
    options = ("--framework", framework, *OPTIONS)
    folder = tmp_path_factory.mktemp("job")
    run = train(cluster, launcher(cluster, controller), *options, folder=folder)
    alone = train_here(1, "none", *options, cwd=temporary_folder(), OMP_NUM_THREADS="1")
    assert len(run.losses) == len(alone.losses) == STEPS
    assert np.max(np.abs(np.asarray(run.losses) / np.asarray(alone.losses) - 1)) < TOLERANCE
    spoken = {"mpi": "MPI", "gloo": "Gloo"}[controller]
    assert f"4 on 3 hosts (h1: 2, h2: 1, h3: 1), coordinated by {spoken}" in run.result.stdout
    assert [line["step"] for line in run.metrics if line["phase"] == "train"] == list(range(1, STEPS + 1))
    assert {line["workers"] for line in run.metrics} == {4}
    assert len(list(run.folder.glob("events.out.tfevents.*"))) == 1
    assert run.result.stdout.count("done: loss") == 1


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_head_without_workers_starts_them_and_only_the_host_of_rank_0_writes(controller, tmp_path):
    with Cluster({"head": 0, "h1": 1, "h2": 2}, shared=tmp_path) as cluster:
        (tmp_path / "run").mkdir()
        for name in ("head", "h2"):  # these see another folder in its place
            (tmp_path / name).mkdir()
            cluster.hosts[name].bind(tmp_path / name, tmp_path / "run")
        options = ("--framework", "torch", "--steps", "10")
        run = train(cluster, launcher(cluster, controller), *options, folder=tmp_path)
        assert "3 on 2 hosts (h1: 1, h2: 2)" in run.result.stdout
        assert run.summary["status"] == "completed"
        assert run.summary["checkpoint"]
        for name in ("head", "h2"):
            assert not list((tmp_path / name).iterdir())
