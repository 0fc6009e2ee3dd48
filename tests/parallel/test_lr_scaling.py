"""The learning rate against the number of workers, as metrics.jsonl shows it."""

from itertools import pairwise

import pytest
from support.pool import shared_run

RATE, SAMPLES = 0.01, 1438
OPTIONS = ("--framework", "torch", "--batch-size", "32", "--learning-rate", str(RATE), "--lr-schedule",
           "constant", "--warmup-epochs", "1", "--epochs", "2", "--log-every", "1")  # fmt: skip


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", 2**0.5)])
@pytest.mark.pool("torch", "mpi", 2)
def test_a_warmup_leads_to_the_scaled_rate(rule, factor):
    run = shared_run(2, "mpi", *OPTIONS, "--lr-scaling", rule)
    lines = [line for line in run.metrics if line["phase"] == "train"]
    middles = [sum(pair) / 2 / SAMPLES for pair in pairwise([0, *(line["samples"] for line in lines)])]
    found = [line["learning_rate"] for line in lines]
    assert len(found) == 45
    assert found == pytest.approx([factor * RATE * min(1, epoch) for epoch in middles])
