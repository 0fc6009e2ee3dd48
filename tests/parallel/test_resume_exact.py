"""A run whose workers were all killed and that was resumed is, bit for bit, the one that never was."""

import pytest
from support.jobs import temporary_folder
from support.resuming import (
    checkpoint_files,
    command_for,
    content_of,
    killed_at,
    logged,
    random_step,
    resumed_from,
    trained,
    trained_steps,
)

SAMPLES = 47  # no checkpoint of these runs lies between two epochs
OPTIONS = (
    *("--steps", "60", "--batch-size", "3", "--accumulate", "2", "--save-every", "5"),
    *("--eval-every", "8", "--optimizer", "adamw", "--lr-schedule", "cosine", "--warmup-epochs", "1"),
    *("--set", "trace_indices=true", "--set", f"task_options.samples={SAMPLES}"),
)
SAMPLE_SECONDS = 0.012  # 60 steps take seconds, so that the kill comes in time
# framework, workers, controller, steps to a logged line: lines of seven steps straddle checkpoints
JOBS = [
    ("torch", 2, "mpi", 7),
    ("tf", 2, "gloo", 1),
]


def options(framework: str, log_every: int) -> tuple[str, ...]:
    return ("--framework", framework, "--log-every", str(log_every), *OPTIONS)


@pytest.mark.parametrize(("framework", "workers", "controller", "log_every"), JOBS)
def test_a_killed_run_is_resumed_bit_for_bit(framework, workers, controller, log_every):
    """All are killed at a random step; the run goes on from a checkpoint in mid-epoch, and loses nothing."""
    job = workers, controller, "Dropping", *options(framework, log_every)
    whole, folder = trained(*job, cwd=temporary_folder()), temporary_folder()
    step = random_step(7, 28, f"{(framework, workers, controller, log_every)}")
    killed_at(step, command_for(*job), folder, SAMPLE_SECONDS)
    resumed = trained(*job, "--resume", cwd=folder)
    step, samples = resumed_from(resumed)
    assert step > 0
    assert samples % SAMPLES
    steps = trained_steps(whole)
    assert steps[0] == 1 or step not in steps  # a line of seven steps straddles the checkpoint
    assert trained_steps(resumed) == steps
    assert logged(resumed) == logged(whole)
    assert checkpoint_files(resumed) == checkpoint_files(whole)
    assert content_of(resumed.folder / "indices") == content_of(whole.folder / "indices")
