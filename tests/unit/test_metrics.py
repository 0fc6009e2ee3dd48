"""From totals on the device to means and throughput."""

from hvdtrain.backends.step_metrics import StepMetrics, StepStatistics
from hvdtrain.metrics import DelayedMetrics, StepInfo, Window


class Pending:
    """StepMetrics that tell when they are read."""

    def __init__(self, step: int, read: list[int]) -> None:
        self._step, self._read = step, read

    def read(self) -> StepMetrics:
        self._read.append(self._step)
        return StepMetrics({"loss": float(self._step)}, 1.0)


def mark(step: int) -> StepInfo:
    return StepInfo(step, step - 1, step, step / 100, 1, 0.1, float(step))


def test_totals_are_read_when_the_next_step_has_been_launched():
    late, read = DelayedMetrics(), []
    taken = []
    for step in (1, 2, 3):
        taken.append([m.step for m, _ in late.push(mark(step), Pending(step, read))])
    assert taken == [[], [1], [2]]
    assert read == [1, 2]


def test_a_mean_is_over_samples_not_over_steps():
    window = Window(started_seconds=0.0)
    window.add(StepMetrics({"loss": 6.0, "accuracy": 2.0}, weight=3.0), 1.0)
    window.add(StepMetrics({"loss": 4.0, "accuracy": 1.0}, weight=1.0), 2.0)
    assert window.means() == {"loss": 2.5, "accuracy": 0.75}


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


def test_a_window_that_goes_on_has_the_mean_of_all_its_samples():
    window = Window({"loss": 6.0}, 3.0, untimed_weight=3.0, started_seconds=0.0)
    window.add(StepMetrics({"loss": 4.0}, weight=1.0), 1.0)
    assert window.means() == {"loss": 2.5}


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
