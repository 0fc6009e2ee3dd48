"""A made-up measurement of a job, from which plans are computed."""

from hvdtrain.tools.bench.forecast import Measured
from hvdtrain.tools.bench.options import parse_link
from hvdtrain.tools.spread import Spread

MIB = 2**20
SHAPES = [(1024, 1024), (1024,)]
SIZE = 4 * (1024 * 1024 + 1024)


def sure(value: float) -> Spread:
    return Spread(value, value, value)


def of_three(value: float) -> dict[str, float]:
    return sure(value).to_dict()


# 20 ms of computing, and a sum of 1 ms + 1 ms/MiB
DOCUMENT = {
    "version": 2, "task": "digits", "device": "PyTorch on the CPU", "workers": 2, "hosts": 1, "slots": 2,
    "controller": "Gloo", "global_batch": 64, "mean_step_seconds": of_three(30e-3),
    "part_seconds": {
        "data": of_three(1e-3), "compute": of_three(20e-3), "slowest": of_three(0.5e-3),
        "communication": of_three(8.5e-3),
    },
    "all_reduce": [
        {"bytes": 4096, "horovod_seconds": of_three(1e-3)},
        {"bytes": 4096 + MIB, "horovod_seconds": of_three(2e-3)},
    ],
    "exchange": {"name": "none", "sizes": (SIZE,), "small": 0, "agreements": 1, "every": 1},
    "warnings": ["h1 was busy"], "notes": ["a note"],
}  # fmt: skip
MEASURED = Measured.of(DOCUMENT)
FAST = parse_link("10gbit/50us")
