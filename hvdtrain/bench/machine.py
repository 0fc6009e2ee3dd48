"""What else kept the machines busy while a job was measured."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from hvdtrain.workers.wire_types import travels

_OTHERS = 0.1  # of a core, beside 2 % of all cores
_OTHERS_SHARE = 0.02
_STEAL_SHARE = 0.02


@travels
@dataclass(frozen=True)
class CpuTimes:
    """What the clocks of a worker and its host say.

    Attributes:
        host: the host's name.
        cores: the host's cores.
        seconds: wall-clock time.
        busy: CPU seconds of the whole host.
        stolen: CPU seconds that the machine below it gave to others.
        own: CPU seconds of this worker and of its processes, those that have ended included.
    """

    host: str
    cores: int
    seconds: float
    busy: float
    stolen: float
    own: float

    @classmethod
    def now(cls, host: str) -> "CpuTimes":
        """Return what they say now."""
        times = psutil.cpu_times()
        busy = sum(getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq"))
        return cls(
            host,
            psutil.cpu_count() or 1,
            time.perf_counter(),
            busy,
            getattr(times, "steal", 0.0),
            _own_seconds(),
        )

    def since(self, before: "CpuTimes") -> "CpuTimes":
        """Return the differences to an earlier time."""
        return CpuTimes(
            self.host,
            self.cores,
            self.seconds - before.seconds,
            self.busy - before.busy,
            self.stolen - before.stolen,
            self.own - before.own,
        )


def _own_seconds() -> float:
    """Return the CPU seconds of this process and those below it; one that has ended counts in its parent."""
    total = 0.0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def busy_hosts(of_ranks: Sequence[CpuTimes]) -> list[str]:
    """Return a warning for each host that was busy with something else than the job's workers.

    Args:
        of_ranks: what each worker measured over the same time.
    """
    warnings = []
    for host in dict.fromkeys(one.host for one in of_ranks):
        workers = [one for one in of_ranks if one.host == host]
        seconds = max(workers[0].seconds, 1e-9)
        cores = workers[0].cores
        others = (workers[0].busy - sum(one.own for one in workers)) / seconds
        stolen = workers[0].stolen / seconds
        if others > _OTHERS + _OTHERS_SHARE * cores:
            warnings.append(
                f"{host} was busy: other processes used {others:.1f} of its {cores} cores, so these figures "
                "are worse than on an idle machine"
            )
        if stolen > _STEAL_SHARE * cores:
            warnings.append(
                f"{host} is a virtual machine that did not get {stolen:.1f} of its {cores} cores "
                "(CPU steal), so these figures vary with what its neighbours do"
            )
    return warnings
