"""Every sample once an epoch, and the same global batches at every worker count."""

import json
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


@pytest.mark.parametrize("job", JOBS)
def test_every_epoch_sees_every_sample_once_in_batches_that_the_workers_share(job):
    steps = steps_of(job)
    batches = [list(chain.from_iterable(step)) for step in steps]  # in the order of ranks
    stream = list(chain.from_iterable(batches))
    assert len(stream) == 2 * SAMPLES
    for epoch in range(2):
        assert sorted(stream[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    spanning, rest = divmod(SAMPLES, GLOBAL_BATCH)  # a batch spans two epochs
    assert len(batches[spanning]) == GLOBAL_BATCH
    before = set(chain.from_iterable(batches[:spanning]))
    assert set(batches[spanning][:rest]) == set(range(SAMPLES)) - before
    for step in steps:
        shares = [len(indices) for indices in step]
        assert max(shares) - min(shares) <= 1
    alone = [set(chain.from_iterable(step)) for step in steps_of(JOBS[0])]
    assert [set(batch) for batch in batches] == alone
