"""The most memory that any worker of a job has had, as far as the workers have told one another."""

from dataclasses import dataclass

from hvdtrain.backends.base import Backend
from hvdtrain.backends.step_signals import StepStatistics
from hvdtrain.host.memory import peak_bytes
from hvdtrain.metric_names import PEAK_DEVICE_MEMORY, PEAK_MEMORY

_MEBIBYTE = 1 << 20


@dataclass
class MemoryPeak:
    """The most memory that a worker has had, in MiB; the largest over the workers, equal on all of them.

    All workers tell theirs before the first step and after the last one. In between, one worker tells in each
    step in which they sum gradients, each in its turn: so nothing more is sent, and with N workers a number
    is at most N such steps old.

    Attributes:
        host_mib: resident memory of a worker's process, pages of files included; 0 before it is known.
        device_mib: what tensors took on a worker's GPU; 0 on the CPU.
    """

    host_mib: float = 0.0
    device_mib: float = 0.0

    @property
    def numbers(self) -> tuple[float, float]:
        """The attributes."""
        return self.host_mib, self.device_mib

    def take(self, told: StepStatistics) -> None:
        """Take what a worker told."""
        self.host_mib = max(self.host_mib, told.host_peak_mib)
        self.device_mib = max(self.device_mib, told.device_peak_mib)

    def share(self, backend: Backend) -> None:
        """Collective. Let every worker tell."""
        host_mib, device_mib = own_peak_mib(backend)
        for of_host, of_device in backend.workers.allgather_object((host_mib, device_mib)):
            self.take(StepStatistics(host_peak_mib=of_host, device_peak_mib=of_device))

    def values(self) -> dict[str, float]:
        """Return what is known, by the names that metrics.jsonl has."""
        found = {PEAK_MEMORY: self.host_mib, PEAK_DEVICE_MEMORY: self.device_mib}
        return {name: round(value, 1) for name, value in found.items() if value}


def own_peak_mib(backend: Backend) -> tuple[float, float]:
    """Return the most memory that this worker has had on its host and on its GPU, in MiB. Local."""
    device = backend.device_memory()
    return peak_bytes() / _MEBIBYTE, 0.0 if device is None else device.peak / _MEBIBYTE


def is_turn(number: int, sync_every: int, rank: int, workers: int) -> bool:
    """Return whether a worker tells what memory it has had in a step.

    Args:
        number: the step.
        sync_every: after how many steps the workers sum their numbers.
        rank: the worker.
        workers: number of workers.
    """
    return number % sync_every == 0 and number // sync_every % workers == rank
