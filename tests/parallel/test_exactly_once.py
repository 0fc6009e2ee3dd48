"""Every sample once an epoch, and the same global batches at every worker count."""

import json
from collections.abc import Iterable
from itertools import chain

import pytest
from support.pool import shared_run

SAMPLES, GLOBAL_BATCH = 1438, 50  # digits: 28 batches and 38 samples more
OPTIONS = ("--global-batch-size", str(GLOBAL_BATCH), "--set", "trace_indices=true")
# workers, controller, framework
JOBS = [(1, "none", "torch"), (3, "mpi", "torch"), (2, "gloo", "tf")]


def steps_of(job: tuple[int, str, str], epochs: int = 2) -> list[list[list[int]]]:
    """Train and give, for each step, the indices that each rank trained on."""
    workers, controller, framework = job
    run = shared_run(workers, controller, "--framework", framework, "--epochs", str(epochs), *OPTIONS)
    ranks = []
    for path in sorted((run.folder / "indices").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, run.summary["steps"] + 1))
        ranks.append([line["indices"] for line in lines])
    assert len(ranks) == workers
    return [list(step) for step in zip(*ranks, strict=True)]


def batches(steps: list[list[list[int]]]) -> list[list[int]]:
    """Give the global batch of each step, in the order of ranks."""
    return [joined(step) for step in steps]


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize("job", JOBS)
def test_every_epoch_sees_every_sample_once(job):
    stream = joined(batches(steps_of(job)))
    assert len(stream) == 2 * SAMPLES
    for epoch in range(2):
        assert sorted(stream[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))


@pytest.mark.parametrize("job", JOBS[1:])
def test_global_batches_do_not_depend_on_the_worker_count(job):
    alone = [set(batch) for batch in batches(steps_of(JOBS[0]))]
    assert [set(batch) for batch in batches(steps_of(job))] == alone


@pytest.mark.parametrize("job", JOBS[1:])
def test_workers_share_every_batch_evenly(job):
    for step in steps_of(job):
        shares = [len(indices) for indices in step]
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("job", JOBS[:2])
def test_a_batch_spans_two_epochs(job):
    spanning = SAMPLES // GLOBAL_BATCH
    found = batches(steps_of(job))
    before = joined(found[:spanning])
    rest = SAMPLES % GLOBAL_BATCH
    assert len(found[spanning]) == GLOBAL_BATCH
    assert set(found[spanning][:rest]) == set(range(SAMPLES)) - set(before)
