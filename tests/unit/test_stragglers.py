"""What workers tell one another with a step, and which of them the others wait for."""

import itertools

import pytest
from support.fakes import FakeBackend, make_loop_session, one_worker

from hvdtrain.backends.step_metrics import ControlFlags, StepMetrics, StepStatistics, encode_signals
from hvdtrain.loop import run
from hvdtrain.workers.stragglers import BusyTimes, StragglerWatch


def times(*seconds: float, steps: int = 10) -> BusyTimes:
    busy = BusyTimes()
    for _ in range(steps):
        busy.add(seconds)
    return busy


def test_waiting_is_counted_step_by_step():
    """Workers that are slow in turns wait for one another, though their sums are equal."""
    busy = BusyTimes()
    for step in range(10):
        busy.add((0.3, 0.1) if step % 2 else (0.1, 0.3))
    assert busy.values(4.0) == {"slowest_rank": 0, "wait_fraction": pytest.approx(0.25)}


def test_a_straggler_is_noted_once_when_it_has_lasted():
    watch = StragglerWatch()
    found = [watch.take(times(0.05, 0.1), 2.0) for _ in range(6)]
    assert [bool(text) for text in found] == [False, False, True, False, False, False]
    assert "rank 1 is slower than the others: it is busy 100 ms in a step" in found[2]


@pytest.mark.parametrize(
    "windows",
    [
        [times(0.05, 0.1)] * 2 + [times(0.1, 0.1)] + [times(0.05, 0.1)] * 2,
        [times(0.05, 0.06)] * 6,
        [times(0.001, 0.002)] * 6,
        [times(0.005, 0.012)] * 6,
    ],
    ids=["does not last", "little slower", "of no weight in the time", "costs less than a second"],
)
def test_what_is_no_straggler_is_not_noted(windows):
    watch = StragglerWatch()
    assert not any(watch.take(busy, 1.0) for busy in windows)


def test_evaluations_and_saves_are_left_out(tmp_path):
    backend = FakeBackend(one_worker())
    run(make_loop_session(tmp_path, backend, eval_size=4, eval_every="1epoch", save_every="1epoch"))
    calls = backend.calls
    trains = [i for i, call in enumerate(calls) if call.startswith("train")]
    pauses = [
        i for i, call in enumerate(calls) if call in ("compare", "gather") or call.startswith("read eval")
    ]
    assert trains[0] >= backend.clocks[0]
    assert pauses
    for pause in pauses:
        next_train = next((train for train in trains if train > pause), len(calls))
        assert next_train == len(calls) or any(pause < begun <= next_train for begun in backend.clocks)


ALL = [ControlFlags(*wanted) for wanted in itertools.product([False, True], repeat=4)]


def test_vectors_add_up_to_what_any_worker_wants():
    for several in itertools.product(ALL, repeat=2):
        vector = [3.0, 0.0, 0.0, 0.0, *map(sum, zip(*map(encode_signals, several), strict=True))]
        assert StepMetrics.from_vector(["loss"], vector, 1.0).flags == several[0] | several[1]


def test_statistics_add_up_over_workers():
    told = [StepStatistics(skipped_samples=1), StepStatistics(2, 0.25), StepStatistics()]
    vectors = [encode_signals(statistics=one) for one in told]
    vector = [3.0, 0.0, 0.0, 0.0, *map(sum, zip(*vectors, strict=True))]
    metrics = StepMetrics.from_vector(["loss"], vector, 8.0)
    assert metrics.statistics == StepStatistics(3, 0.25)
    assert metrics.without_skipped_samples().weight == 5.0
    for unused in (0.9999999, 1.0000001):  # whatever rounding did
        metrics = StepMetrics.from_vector([], [unused, 0.0, 0.0, *4 * [0.0], unused, *3 * [0.0]], 1.0)
        assert (metrics.unused_parameters, metrics.statistics.skipped_samples) == (1, 1)


def test_sums_of_weights_stand_behind_the_sums():
    signals = encode_signals(ControlFlags(save=True), StepStatistics(2, 0.5))
    vector = [3.0, 2.0, 1.5, 5.0, 1.0, 0.25, *signals]
    metrics = StepMetrics.from_vector(["loss", "accuracy"], vector, 4.0, ["a"], weighted=["loss"])
    assert metrics.sums == {"loss": 3.0, "accuracy": 2.0, "gradient_norm": 0.25}
    assert metrics.weights == {"loss": 1.5, "gradient_norm": 1.0}
    assert (metrics.mean("loss"), metrics.mean("accuracy")) == (2.0, 0.5)
    assert (metrics.unused_parameters, metrics.unused_names, metrics.overflow_exhausted) == (5, ("a",), True)
    assert (metrics.flags, metrics.statistics) == (ControlFlags(save=True), StepStatistics(2, 0.5))
