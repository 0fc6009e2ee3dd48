"""The same curve at every worker count, over both controllers and in both frameworks."""

import numpy as np
import pytest
from support import jobs
from support.jobs import FRAMEWORKS
from support.pool import controller_of, shared_run

# digits without dropout or batch norm, every step logged; the decay makes schedules count, too
STEPS = ("--steps", "100", "--log-every", "1")
TOLERANCE = 1e-4  # relative, per step: the design's promise
# launcher, workers: numbers of workers among both frameworks, and each launcher's reductions in
# both. What a controller adds does not depend on the number of workers beyond two: the sums are the
# same all-reduces, whose order is the library's.
LAUNCHED = {
    "torch": [("mpi", 2), ("gloo", 2)],
    "tf": [("gloo", 2)],
}
JOBS = [(framework, *job) for framework, jobs_of in LAUNCHED.items() for job in jobs_of]


def difference(losses: list[float], expected: list[float]) -> float:
    """Give the largest relative difference between two curves of 100 steps."""
    assert len(losses) == len(expected) == 100
    return float(np.max(np.abs(np.asarray(losses) / np.asarray(expected) - 1)))


def one_worker(framework: str, *options: str) -> list[float]:
    return shared_run(1, "none", "--framework", framework, *STEPS, *options).losses


@pytest.mark.parametrize(("framework", "controller", "workers"), JOBS)
def test_curve_does_not_depend_on_the_worker_count(framework, controller, workers):
    options = ("--global-batch-size", "48")
    run = shared_run(workers, controller, "--framework", framework, *STEPS, *options)
    assert {line["workers"] for line in run.metrics} == {workers}
    assert difference(run.losses, one_worker(framework, *options)) < TOLERANCE


@pytest.mark.parametrize(("framework", "workers"), [("torch", 3), ("tf", 2)])
def test_curve_with_a_batch_that_the_workers_do_not_divide(framework, workers):
    options = ("--global-batch-size", "49")
    run = shared_run(workers, controller_of(framework, workers), "--framework", framework, *STEPS, *options)
    assert difference(run.losses, one_worker(framework, *options)) < TOLERANCE


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_curve_with_accumulation(framework):
    options = ("--global-batch-size", "48")
    controller = controller_of(framework, 2)
    run = shared_run(2, controller, "--framework", framework, *STEPS, *options, "--accumulate", "3")
    assert difference(run.losses, one_worker(framework, *options)) < TOLERANCE


OPTIMIZERS = {
    "sgd": ("--optimizer", "sgd", "--momentum", "0.9", "--weight-decay", "0.001", "--learning-rate", "0.05"),
    "adamw": ("--optimizer", "adamw", "--weight-decay", "0.01", "--learning-rate", "0.001"),
    "clipped": ("--clip-norm", "0.5", "--learning-rate", "0.05"),
}


@pytest.mark.parametrize("workers", [2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_frameworks_draw_the_same_curve(optimizer, workers):
    options = ("--global-batch-size", "48", *OPTIMIZERS[optimizer])
    curves = [
        shared_run(
            workers, controller_of(framework, workers), "--framework", framework, *STEPS, *options
        ).losses
        for framework in FRAMEWORKS
    ]
    assert difference(*curves) < TOLERANCE


@pytest.mark.parametrize("framework", ["torch"])
def test_the_same_command_repeats_itself_exactly(framework, tmp_path):
    """Launched by itself it also gives what it gives among the other cases of a pool."""
    options = ("--framework", framework, *STEPS, "--global-batch-size", "48")
    alone = jobs.train(2, "mpi", *options, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert alone.losses == shared_run(2, "mpi", *options).losses


TWICE = """
import sys
import hvdtrain

for name in ("one", "two"):
    hvdtrain.train("digits", framework=sys.argv[1], steps=50, log_every=1, run_dir=name, quiet=True)
"""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_worker_on_all_cores_repeats_itself_exactly(framework, tmp_path):
    """As it runs by default; the jobs of other tests compute with one thread."""
    result = jobs.run(["python", "-c", TWICE, framework], tmp_path)
    assert result.returncode == 0, result.output[-5000:]
    one, two = (jobs.Run(tmp_path / name, result).losses for name in ("one", "two"))
    assert len(one) == 50
    assert one == two
