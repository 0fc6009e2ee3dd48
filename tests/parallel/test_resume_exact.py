"""A run whose workers were all killed and that was resumed is, bit for bit, the one that never was."""

import functools

import pytest
from support.jobs import Run, temporary_folder
from support.pool import controller_of
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


@functools.cache
def uninterrupted(framework: str, workers: int, log_every: int) -> Run:
    """Train in one go."""
    controller = controller_of(framework, workers)
    return trained(workers, controller, "Dropping", *options(framework, log_every), cwd=temporary_folder())


@functools.cache
def resumed(framework: str, workers: int, controller: str, log_every: int) -> Run:
    """Train until all are killed at a random step, and from there to the end."""
    job = workers, controller, "Dropping", *options(framework, log_every)
    folder = temporary_folder()
    step = random_step(7, 28, f"{(framework, workers, controller, log_every)}")
    killed_at(step, command_for(*job), folder, SAMPLE_SECONDS)
    return trained(*job, "--resume", cwd=folder)


@pytest.fixture(params=JOBS, ids=lambda job: "-".join(map(str, job)))
def pair(request):
    framework, workers, controller, log_every = request.param
    return resumed(framework, workers, controller, log_every), uninterrupted(framework, workers, log_every)


def test_it_went_on_from_a_checkpoint_in_mid_epoch(pair):
    step, samples = resumed_from(pair[0])
    assert step > 0
    assert samples % SAMPLES
    logged_steps = trained_steps(pair[1])
    assert logged_steps[0] == 1 or step not in logged_steps  # a line of seven steps straddles the checkpoint


def test_no_step_is_logged_twice_or_left_out(pair):
    assert trained_steps(pair[0]) == trained_steps(pair[1])


def test_all_that_is_logged_is_the_same(pair):
    assert logged(pair[0]) == logged(pair[1])


def test_the_final_parameters_are_the_same(pair):
    name = "model.safetensors"
    assert checkpoint_files(pair[0])[name] == checkpoint_files(pair[1])[name]


def test_the_final_state_of_the_optimizer_is_the_same(pair):
    name = "optimizer.safetensors"
    assert checkpoint_files(pair[0])[name] == checkpoint_files(pair[1])[name]


def test_the_same_samples_are_trained_on(pair):
    assert content_of(pair[0].folder / "indices") == content_of(pair[1].folder / "indices")
