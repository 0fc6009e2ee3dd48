"""The same curve at every worker count, over both controllers and in both frameworks."""

import pytest
from support import jobs
from support.jobs import FRAMEWORKS
from support.pool import controller_of, shared_run
from support.resuming import checkpoint_files

# digits without dropout or batch norm, every step logged; the decay makes schedules count, too
STEPS = ("--steps", "100", "--log-every", "1")
TOLERANCE = 1e-4  # relative, per step: the design's promise
# Numbers of workers among both frameworks, and each launcher's reductions. What a controller adds does not
# depend on the number of workers beyond two: the sums are the same all-reduces, whose order is the library's.
# With a batch of 49 samples, workers have parts of unequal length.
JOBS = [
    ("torch", "mpi", 2, "48"),
    ("torch", "gloo", 2, "48"),
    ("tf", "gloo", 2, "48"),
    ("torch", "mpi", 3, "49"),
    ("tf", "gloo", 2, "49"),
    ("torch", "mpi", 2, "48 --accumulate 3"),
    ("tf", "gloo", 2, "48 --accumulate 3"),
]


def trained(framework: str, controller: str, workers: int, batch: str, *options: str) -> jobs.Run:
    words = ("--framework", framework, *STEPS, "--global-batch-size", *batch.split(), *options)
    return shared_run(workers, controller, *words)


@pytest.mark.parametrize(("framework", "controller", "workers", "batch"), JOBS)
def test_curve_does_not_depend_on_the_worker_count(framework, controller, workers, batch):
    run = trained(framework, controller, workers, batch)
    assert {line["workers"] for line in run.metrics} == {workers}
    assert len(run.losses) == 100
    assert run.difference(trained(framework, "none", 1, batch.split()[0])) < TOLERANCE


OPTIMIZERS = {
    "sgd": ("--optimizer", "sgd", "--momentum", "0.9", "--weight-decay", "0.001", "--learning-rate", "0.05"),
    "adamw": ("--optimizer", "adamw", "--weight-decay", "0.01", "--learning-rate", "0.001"),
    "clipped": ("--clip-norm", "0.5", "--learning-rate", "0.05"),
}


@pytest.mark.parametrize("workers", [2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_both_frameworks_draw_the_same_curve(optimizer, workers):
    runs = [trained(f, controller_of(f, workers), workers, "48", *OPTIMIZERS[optimizer]) for f in FRAMEWORKS]
    assert runs[0].difference(runs[1]) < TOLERANCE


@pytest.mark.parametrize(("framework", "controller", "workers"), [("torch", "mpi", 3)])
def test_the_same_command_repeats_itself_exactly(framework, controller, workers, tmp_path):
    """Of three numbers, the sum must not depend on timing; a launch gives what a pool gives among others."""
    options = ("--framework", framework, *STEPS, "--global-batch-size", "49")
    alone = jobs.train(workers, controller, *options, cwd=tmp_path, OMP_NUM_THREADS="1")
    again = trained(framework, controller, workers, "49")
    assert alone.losses == again.losses
    assert checkpoint_files(alone) == checkpoint_files(again)


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
