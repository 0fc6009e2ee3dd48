"""A made-up measurement of a job, from which plans are computed."""

from hvdtrain.bench.predict import Measured
from hvdtrain.bench.predict_curve import Curve
from hvdtrain.bench.predict_link import parse_link
from hvdtrain.bench.predict_ways import half, local_steps, low_rank, uncompressed
from hvdtrain.bench.spread import Spread

MIB = 2**20
SHAPES = [(1024, 1024), (1024,)]
WAYS = (uncompressed(SHAPES), half(SHAPES), low_rank(SHAPES, 4), local_steps(SHAPES, 10, 2))


def sure(value: float) -> Spread:
    return Spread(value, value, value)


CURVE = Curve([(4096, sure(1e-3)), (MIB, sure(2e-3)), (16 * MIB, sure(17e-3))])
MEASURED = Measured(
    2, 1, 2, "Gloo", False, 32.0, sure(30e-3), sure(1e-3), sure(20e-3), sure(0.0), (0.0, 0.0), CURVE,
    sure(1e-4), WAYS,
)  # fmt: skip
FAST = parse_link("10gbit/50us")
