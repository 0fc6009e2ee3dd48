"""lars and lamb draw one curve: in both frameworks, at any number of workers, resumed or not."""

import pytest
from support.jobs import Run
from support.pool import controller_of, shared_run

STEPS = 60
OPTIONS = {
    "lars": (
        *("--learning-rate", "10", "--weight-decay", "0.001"),
        *("--set", 'parameter_groups=[{"match": "*bias", "learning_rate_factor": 0.05}]'),
    ),
    "lamb": ("--learning-rate", "0.01", "--weight-decay", "0.01"),
}
TOLERANCE = 1e-4


def trained(framework: str, workers: int, optimizer: str, *options: str) -> Run:
    return shared_run(
        workers,
        controller_of(framework, workers),
        *("--framework", framework, "--steps", str(STEPS), "--log-every", "1", "--global-batch-size", "48"),
        *("--save-every", "20", "--optimizer", optimizer, *OPTIONS[optimizer], *options),
    )


@pytest.mark.parametrize(
    ("framework", "workers", "optimizer"), [("torch", 3, "lars"), ("tf", 2, "lamb"), ("tf", 1, "lars")]
)
def test_the_curve_is_that_of_one_worker_in_pytorch(framework, workers, optimizer):
    run = trained(framework, workers, optimizer)
    assert len(run.losses) == STEPS
    assert run.difference(trained("torch", 1, optimizer)) < TOLERANCE


@pytest.mark.parametrize(
    ("optimizer", "source", "target"),
    [("lars", ("torch", 3), ("tf", 1)), ("lamb", ("tf", 2), ("torch", 1))],
)
def test_it_goes_on_in_the_other_framework_at_another_worker_count(optimizer, source, target):
    checkpoint = trained(*source, optimizer).folder / "checkpoints" / "step-00000020"
    run = trained(*target, optimizer, "--resume", str(checkpoint))
    assert len(run.losses) == STEPS - 20
    assert run.difference(trained("torch", 1, optimizer)) < TOLERANCE
