"""What takes part in the loop without being a part of it: a profile, a trace, the peak of memory."""

from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from functools import partialmethod
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.step_metrics import StepStatistics
from hvdtrain.early_stopping import PEAK_DEVICE_MEMORY, PEAK_MEMORY
from hvdtrain.host.cores import peak_bytes
from hvdtrain.workers.activity import ACTIVITY, READING_DATA, TRAINING

_FIRST_STEPS = 2
_MEBIBYTE = 1 << 20


class Phase(Enum):
    """What the loop does, but for reading data, evaluating and saving."""

    PREPARING = "starting to train"
    TRAINING = TRAINING
    COMPARING = "comparing parameters after step"
    ENDING = "ending training after step"


class LoopHook:
    """A part of hvdtrain that takes part in the loop, such as a profile: override what is needed.

    The loop calls a list of hooks and knows none by name. All workers have the same ones in the same order,
    so that they may call collectives where it says so. Steps are counted from 1. As a context manager, a hook
    is entered before the first step with these workers and left after their last one or on an exception.
    """

    def on_workers(self) -> None:
        """Collective. Called before training starts or continues with these workers, and when it is over."""

    def before_step(self, step: int) -> None:
        """Collective. Called before the batch of a step is read, also if no such step follows."""

    def on_batch(self, batch: Any) -> None:
        """Local. Called just before a step."""

    def after_steps(self, step: int) -> None:
        """Collective. Called when no step follows the last one, which was ``step``."""

    def on_phase(self, phase: Phase, step: int = 0) -> None:
        """Local. Called when a phase of a step begins; of none if ``step`` is 0."""

    def after_pause(self) -> None:
        """Local. Called after what is no part of the steps, such as an evaluation."""

    def measure(self, step: int) -> dict[str, float]:
        """Local. Return what this worker adds to the sums that travel with a step, as ``StepStatistics``."""
        return {}

    def take(self, sums: StepStatistics) -> None:
        """Local. Take the sums over all workers that travelled with a step."""

    def values(self) -> dict[str, float]:
        """Local. Return what a logged window or an evaluation has in addition to its metrics, by name."""
        return {}

    def __enter__(self) -> "LoopHook":
        """Return it."""
        return self

    def __exit__(self, *exception: Any) -> None:
        """Do nothing."""


class LoopHooks(LoopHook):
    """Hooks of the loop as one, which calls them in the order of their list."""

    def __init__(self, *hooks: LoopHook) -> None:
        self.hooks = hooks
        self._entered = ExitStack()

    def __enter__(self) -> "LoopHooks":
        with ExitStack() as entered:
            for hook in self.hooks:
                entered.enter_context(hook)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)

    def _call_each(self, method: str, *arguments: Any) -> dict[str, float]:
        """Call this method of each hook, and join what they return."""
        found = [getattr(hook, method)(*arguments) for hook in self.hooks]
        return {name: number for numbers in found for name, number in (numbers or {}).items()}


for _method in [name for name in vars(LoopHook) if not name.startswith("_")]:
    setattr(LoopHooks, _method, partialmethod(LoopHooks._call_each, _method))


class Activities(LoopHook):
    """Sets this worker's activity, for whoever watches it; the first two steps may compile: long."""

    def __init__(self, last_local_step: Callable[[], int | None]) -> None:
        self._last_local_step = last_local_step
        self._first = 0
        self._last: int | None = None

    def __enter__(self) -> "Activities":
        self._first, self._last = 0, self._last_local_step()
        return self

    def before_step(self, step: int) -> None:
        """The batch of a step is read; that of the first may take long."""
        ACTIVITY.enter(READING_DATA, step, is_long=not self._first)
        self._first = self._first or step

    def on_phase(self, phase: Phase, step: int = 0) -> None:
        """Enter a phase."""
        is_long = step < self._first + _FIRST_STEPS or step == self._last
        ACTIVITY.enter(phase.value, step, is_long=is_long if phase is Phase.TRAINING else True)


class Clock(LoopHook):
    """Restarts the clock of a backend at the first step and after pauses."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._is_started = backend, False

    def __enter__(self) -> "Clock":
        self._is_started = False
        return self

    def before_step(self, step: int) -> None:
        """Start the clock before the first step."""
        if not self._is_started:
            self._backend.restart_clock()
        self._is_started = True

    def after_pause(self) -> None:
        """Leave the pause out of the busy time of the next step."""
        self._backend.restart_clock()


class MemoryPeak(LoopHook):
    """The most memory that a worker has had, in MiB; the largest over the workers, equal on all of them.

    All workers report theirs before the first step and after the last one. In between, one worker reports in
    each step in which they sum gradients, each in its turn: so nothing more is sent, and with N workers a
    number is at most N such steps old.
    """

    def __init__(self, backend: Backend, sync_every: int = 1) -> None:
        self._backend, self._sync_every = backend, sync_every
        self.host_mib = self.device_mib = 0.0

    def on_workers(self) -> None:
        """Collective. Let every worker report its peak."""
        for of_host, of_device in self._backend.workers.allgather_object(own_peak_mib(self._backend)):
            self.take(StepStatistics(host_peak_mib=of_host, device_peak_mib=of_device))

    def measure(self, step: int) -> dict[str, float]:
        """Return this worker's peak if it is its turn."""
        workers = self._backend.workers
        if step % self._sync_every or step // self._sync_every % workers.size != workers.rank:
            return {}
        host_mib, device_mib = own_peak_mib(self._backend)
        return {"host_peak_mib": host_mib, "device_peak_mib": device_mib}

    def take(self, sums: StepStatistics) -> None:
        """Take the peak that a worker reported."""
        self.host_mib = max(self.host_mib, sums.host_peak_mib)
        self.device_mib = max(self.device_mib, sums.device_peak_mib)

    def values(self) -> dict[str, float]:
        """Return what is known, by the names that metrics.jsonl has."""
        found = {PEAK_MEMORY: self.host_mib, PEAK_DEVICE_MEMORY: self.device_mib}
        return {name: round(value, 1) for name, value in found.items() if value}


def own_peak_mib(backend: Backend) -> tuple[float, float]:
    """Return the most memory that this worker has had on its host and on its GPU, in MiB. Local."""
    device = backend.device_memory()
    return peak_bytes() / _MEBIBYTE, 0.0 if device is None else device.peak / _MEBIBYTE
