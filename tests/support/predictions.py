"""A made-up measurement of a job, from which plans are computed."""

from hvdtrain.tools.bench.forecast import Measured
from hvdtrain.tools.bench.plan_measure import buffers
from hvdtrain.tools.bench.plan_options import parse_link
from hvdtrain.tools.bench.spread import Spread

MIB = 2**20
SHAPES = [(1024, 1024), (1024,)]
SIZE = 4 * (1024 * 1024 + 1024)


def sure(value: float) -> Spread:
    return Spread(value, value, value)


# 20 ms of computing, and a sum of 1 ms + 1 ms/MiB
MEASURED = Measured(
    2, 1, 2, "Gloo", False, 32.0, buffers(SHAPES), sure(30e-3), sure(1e-3), sure(20e-3), sure(0.5e-3),
    sure(1e-3), sure(1e-3 / MIB),
)  # fmt: skip
FAST = parse_link("10gbit/50us")
