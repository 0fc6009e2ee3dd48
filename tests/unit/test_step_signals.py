"""What workers tell one another with a step: it adds up over them and is the same on all."""

import itertools

import pytest

from hvdtrain.backends.step_metrics import ControlFlags, StepMetrics, StepStatistics, encode_signals

ALL = [ControlFlags(*wanted) for wanted in itertools.product([False, True], repeat=4)]


def test_vectors_add_up_to_what_any_worker_wants():
    for several in itertools.product(ALL, repeat=2):
        vector = [3.0, 0.0, 0.0, 0.0, *map(sum, zip(*map(encode_signals, several), strict=True))]
        assert StepMetrics.from_vector(["loss"], vector, 1.0).flags == several[0] | several[1]


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
