"""What workers tell one another with a step: it adds up over them and is the same on all."""

import itertools

import pytest

from hvdtrain.backends.step_metrics import (
    ControlFlags,
    StepMetrics,
    StepStatistics,
    encode_signals,
)

ALL = [ControlFlags(*wanted) for wanted in itertools.product([False, True], repeat=4)]
SOME = [
    ControlFlags(),
    ControlFlags(stop=True),
    ControlFlags(save=True),
    ControlFlags(change=True),
    ControlFlags(trained=True),
]


@pytest.mark.parametrize("one", ALL, ids=str)
@pytest.mark.parametrize("other", ALL, ids=str)
def test_joined_flags_want_what_either_does(one, other):
    joined = one | other
    assert (joined.stop, joined.save) == (one.stop or other.stop, one.save or other.save)
    assert joined.change == (one.change or other.change)
    assert bool(joined) == (bool(one) or bool(other))


@pytest.mark.parametrize("several", list(itertools.product(SOME, repeat=3)), ids=str)
def test_vectors_add_up_to_what_any_worker_wants(several):
    vector = [3.0, 0.0, 0.0, 0.0, *map(sum, zip(*(encode_signals(flags) for flags in several), strict=True))]
    wanted = zip(*((f.stop, f.save, f.change, f.trained) for f in several), strict=True)
    expected = ControlFlags(*map(any, wanted))
    assert StepMetrics.from_vector(["loss"], vector, 1.0).flags == expected


def test_a_vector_has_a_sum_for_each_name_before_findings_and_signals():
    signals = encode_signals(ControlFlags(save=True), StepStatistics(2, 0.5))
    metrics = StepMetrics.from_vector(["loss", "accuracy"], [3.0, 2.0, 5.0, 1.0, 0.0, *signals], 4.0, ["a"])
    assert metrics == StepMetrics(
        {"loss": 3.0, "accuracy": 2.0}, 4.0, 5, ("a",), True, ControlFlags(save=True), StepStatistics(2, 0.5)
    )


def test_statistics_add_up_over_workers():
    told = [StepStatistics(skipped_samples=1), StepStatistics(2, 0.25), StepStatistics()]
    vectors = [encode_signals(statistics=one) for one in told]
    vector = [3.0, 0.0, 0.0, 0.0, *map(sum, zip(*vectors, strict=True))]
    metrics = StepMetrics.from_vector(["loss"], vector, 8.0)
    assert metrics.statistics == StepStatistics(3, 0.25)
    assert metrics.without_skipped_samples().weight == 5.0


@pytest.mark.parametrize("unused", [0.9999999, 1.0, 1.0000001])
def test_a_count_is_whole_whatever_rounding_did(unused):
    metrics = StepMetrics.from_vector([], [unused, 0.0, 0.0, *4 * [0.0], unused, *3 * [0.0]], 1.0)
    assert (metrics.unused_parameters, metrics.statistics.skipped_samples) == (1, 1)


def test_sums_of_weights_stand_behind_the_sums():
    signals = encode_signals(ControlFlags(save=True), StepStatistics(2, 0.5))
    vector = [3.0, 2.0, 1.5, 5.0, 1.0, 0.25, *signals]
    metrics = StepMetrics.from_vector(["loss", "accuracy"], vector, 4.0, weighted=["loss"])
    assert metrics.sums == {"loss": 3.0, "accuracy": 2.0, "gradient_norm": 0.25}
    assert metrics.weights == {"loss": 1.5, "gradient_norm": 1.0}
    assert (metrics.mean("loss"), metrics.mean("accuracy")) == (2.0, 0.5)
    assert (metrics.unused_parameters, metrics.overflow_exhausted) == (5, True)
