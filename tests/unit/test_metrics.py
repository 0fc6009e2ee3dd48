"""From totals on the device to means and throughput."""

from hvdtrain.backends.step_metrics import StepMetrics, StepStatistics
from hvdtrain.metrics import Window


def test_throughput_counts_from_the_windows_start_to_its_last_step():
    window = Window(started_seconds=10.0)
    window.add(StepMetrics({"loss": 1.0}, weight=30.0), 11.0)
    window.add(StepMetrics({"loss": 1.0}, weight=30.0), 14.0)
    assert window.samples_per_second() == 15.0


def test_the_share_of_waiting_is_the_mean_over_workers():
    window = Window(started_seconds=10.0)
    window.add(StepMetrics({"loss": 1.0}, weight=1.0, statistics=StepStatistics(data_wait_seconds=1.0)), 11.0)
    window.add(StepMetrics({"loss": 1.0}, weight=1.0, statistics=StepStatistics(data_wait_seconds=1.0)), 14.0)
    assert window.data_wait_fraction(workers=2) == 0.25


def test_a_metric_that_some_steps_leave_out_has_the_mean_of_the_others():
    window = Window(started_seconds=0.0)
    for step in range(7):
        sums = {"loss": 4.0, **({"own": 8.0} if step in {2, 5} else {})}
        window.add(StepMetrics(sums, weight=4.0), 1.0)
    assert window.means() == {"loss": 1.0, "own": 2.0}


def test_values_with_weights_of_their_own_have_the_mean_over_those():
    window = Window(started_seconds=0.0)
    window.add(StepMetrics({"loss": 6.0, "accuracy": 2.0}, 4.0, weights={"loss": 3.0}), 1.0)
    window.add(StepMetrics({"loss": 0.0, "accuracy": 1.0}, 4.0, weights={"loss": 0.0}), 2.0)
    assert window.means() == {"loss": 2.0, "accuracy": 0.375}
    assert window.samples_per_second() == 4.0
