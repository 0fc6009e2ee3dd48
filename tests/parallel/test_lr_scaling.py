"""The learning rate against the worker count, as the plan says it and as metrics.jsonl shows it."""

import pytest
from support.jobs import Run
from support.pool import shared_run

RATE, SAMPLES = 0.01, 1438
OPTIONS = ("--framework", "torch", "--batch-size", "32", "--learning-rate", str(RATE), "--lr-schedule",
           "constant", "--warmup-epochs", "1", "--epochs", "2", "--log-every", "1")  # fmt: skip
RULES = {"linear": 4, "sqrt": 2, "none": 1}  # 1 -> 4 workers


def run_of(workers: int, rule: str) -> Run:
    return shared_run(workers, "none" if workers == 1 else "mpi", *OPTIONS, "--lr-scaling", rule)


def rates(run: Run) -> list[tuple[float, float]]:
    """Give (epoch in the middle of the step, learning rate) of every step."""
    lines = [line for line in run.metrics if line["phase"] == "train"]
    befores = [0, *(line["samples"] for line in lines)]
    return [
        ((before + line["samples"]) / 2 / SAMPLES, line["learning_rate"])
        for before, line in zip(befores, lines, strict=False)
    ]


def after_warmup(run: Run) -> set[float]:
    found = {round(rate, 12) for epoch, rate in rates(run) if epoch >= 1}
    assert found
    return found


def test_one_worker_trains_with_the_rate_as_given():
    assert after_warmup(run_of(1, "linear")) == {RATE}


@pytest.mark.parametrize(("rule", "factor"), RULES.items())
@pytest.mark.pool("torch", "mpi", 4)
def test_four_workers_train_with_the_scaled_rate(rule, factor):
    assert after_warmup(run_of(4, rule)) == {factor * RATE}


@pytest.mark.parametrize(("rule", "factor"), RULES.items())
@pytest.mark.pool("torch", "mpi", 4)
def test_warmup_leads_to_the_scaled_rate(rule, factor):
    rising = [(epoch, rate) for epoch, rate in rates(run_of(4, rule)) if epoch < 1]
    assert len(rising) == 11
    assert [rate for _, rate in rising] == pytest.approx([factor * RATE * epoch for epoch, _ in rising])


@pytest.mark.pool("torch", "mpi", 4)
@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            "linear",
            "0.04 = 0.01 x 4 (linear rule: global batch 128, quoted for 32), after a warm-up of 1 epoch",
        ),
        ("sqrt", "0.02 = 0.01 x 2 (sqrt rule: global batch 128, quoted for 32), after a warm-up of 1 epoch"),
        ("none", "0.01, after a warm-up of 1 epoch"),
    ],
)
def test_the_plan_says_the_rate_and_its_rule(rule, said):
    assert f"learning rate  {said}" in run_of(4, rule).result.stdout
