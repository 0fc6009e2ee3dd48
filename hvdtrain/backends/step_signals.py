"""What workers tell one another with every step, as a small vector that a backend only sums.

Two things travel in it: control flags, which any worker may raise for all of them, and statistics,
which add up. The encoding is known to this file alone.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True)
class ControlFlags:
    """What a worker wants all workers to do after this step.

    Attributes:
        stop: end training, saved.
        save: save now and continue.
        change: leave this world of an elastic job, and go on in the next one.
        trained: follow what callbacks have frozen or thawed: a worker with this flag undoes the step.
    """

    stop: bool = False
    save: bool = False
    change: bool = False
    trained: bool = False

    def __bool__(self) -> bool:
        return self.stop or self.save or self.change or self.trained

    def without_change(self) -> "ControlFlags":
        """Return what of it stays to be done when the workers have changed."""
        return ControlFlags(self.stop, self.save)

    def __or__(self, other: "ControlFlags") -> "ControlFlags":
        both = zip(astuple(self), astuple(other), strict=True)
        return ControlFlags(*(one or two for one, two in both)) if other else self


@dataclass(frozen=True)
class StepStatistics:
    """What happened on the host before this step, and how much memory a worker has had until then.

    Attributes:
        skipped_samples: how many samples could not be read and were skipped.
        data_wait_seconds: how long the worker waited for data.
        host_peak_mib: the most memory that its process has had, in MiB; only one worker tells in a step, so
            that the sum over workers is that worker's number.
        device_peak_mib: likewise, what tensors have had on its GPU.
    """

    skipped_samples: int = 0
    data_wait_seconds: float = 0.0
    host_peak_mib: float = 0.0
    device_peak_mib: float = 0.0


NO_FLAGS = ControlFlags()
NO_STATISTICS = StepStatistics()
SIGNALS = len(fields(ControlFlags)) + len(fields(StepStatistics))  # numbers in the vector
NO_SIGNALS: tuple[float, ...] = SIGNALS * (0.0,)


def encode_signals(
    flags: ControlFlags = NO_FLAGS, statistics: StepStatistics = NO_STATISTICS
) -> tuple[float, ...]:
    """Return flags and statistics as a vector whose sum over workers ``decode_signals`` reads.

    Without anything to tell, the result is ``NO_SIGNALS`` itself, so that a backend can skip work.
    """
    vector = (
        float(flags.stop),
        float(flags.save),
        float(flags.change),
        float(flags.trained),
        float(statistics.skipped_samples),
        statistics.data_wait_seconds,
        statistics.host_peak_mib,
        statistics.device_peak_mib,
    )
    return vector if any(vector) else NO_SIGNALS


def decode_signals(vector: Sequence[float]) -> tuple[ControlFlags, StepStatistics]:
    """Return the flags that any worker raised and the sums of the statistics over all workers."""
    flags, (skipped, *measured) = vector[:4], vector[4:]
    return ControlFlags(*(flag > 0 for flag in flags)), StepStatistics(round(skipped), *measured)
