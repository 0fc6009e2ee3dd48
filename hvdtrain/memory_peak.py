"""The most memory that any worker of a job has had, as far as the workers have reported it to one another."""

from hvdtrain.backends.base import Backend
from hvdtrain.backends.hooks import LoopHook
from hvdtrain.backends.step_signals import StepStatistics
from hvdtrain.host.memory import peak_bytes
from hvdtrain.metric_names import PEAK_DEVICE_MEMORY, PEAK_MEMORY

_MEBIBYTE = 1 << 20


class MemoryPeak(LoopHook):
    """The most memory that a worker has had, in MiB; the largest over the workers, equal on all of them.

    All workers report theirs before the first step and after the last one. In between, one worker reports in
    each step in which they sum gradients, each in its turn: so nothing more is sent, and with N workers a
    number is at most N such steps old.

    Args:
        backend: the framework.
        sync_every: after how many steps the workers sum their numbers.

    Attributes:
        host_mib: resident memory of a worker's process, pages of files included; 0 before it is known.
        device_mib: what tensors took on a worker's GPU; 0 on the CPU.
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
        if not is_turn(step, self._sync_every, workers.rank, workers.size):
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


def is_turn(number: int, sync_every: int, rank: int, workers: int) -> bool:
    """Return whether a worker reports in a step what memory it has had.

    Args:
        number: the step.
        sync_every: after how many steps the workers sum their numbers.
        rank: the worker.
        workers: number of workers.
    """
    return number % sync_every == 0 and number // sync_every % workers == rank
