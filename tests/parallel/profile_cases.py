"""What pools run for test_profile.py."""

import time

from hvdtrain.backends import load_backend
from hvdtrain.config import Config
from hvdtrain.tools.profile.recording import measure_offset


def offsets(framework: str, ahead_ns: int) -> list[int]:
    """Return offset and uncertainty of this worker's clock, as if each rank had a host of its own."""
    workers = load_backend(Config(framework=framework, device="cpu")).workers
    host = f"host{workers.rank}"
    every = [
        measure_offset(workers, host, lambda: time.time_ns() + ahead_ns * workers.rank) for _ in range(5)
    ]
    found = min(every, key=lambda one: one.uncertainty_ns)  # the machine may be busy
    return [found.offset_ns, found.uncertainty_ns]
