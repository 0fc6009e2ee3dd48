"""Ways in which workers exchange what they learn: which messages each has in a step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from hvdtrain.backends.local_steps import in_parts
from hvdtrain.backends.portable.buckets import divide
from hvdtrain.backends.portable.low_rank import matrix_shape
from hvdtrain.bench.spread import Spread

NOTHING = Spread(0.0, 0.0, 0.0)
GRADIENT = 1e-3  # of the size of which numbers are when sums of fp16 are timed
NONE, FP16 = "none", "fp16"
Shapes = Iterable[tuple[int, ...]]


@dataclass(frozen=True)
class Way:
    """A way of exchanging gradients or parameters.

    Attributes:
        name: "none", "fp16", "powersgd:RANK" or "sync-every N".
        sizes: bytes of the messages that are summed, one after the other.
        small: messages of few bytes beside them: the metrics of the step.
        agreements: how often all wait until every worker is ready for the next messages.
        every: steps from one exchange to the next.
        encoding: seconds for turning numbers into messages and back.
        summing: by how many seconds the measured number of workers sums such numbers slower than fp32.
    """

    name: str
    sizes: Sequence[int]
    small: int = 1
    agreements: int = 1
    every: int = 1
    encoding: Spread = NOTHING
    summing: Spread = NOTHING

    @property
    def bytes_per_step(self) -> float:
        """Bytes that are summed, for each step."""
        return sum(self.sizes) / self.every


def uncompressed(shapes: Shapes, *, on_gpu: bool = False) -> Way:
    """Return the way of a job without compression: one buffer, in which the metrics travel, too.

    Args:
        shapes: of the parameters.
        on_gpu: whether the job computes on GPUs: then there may be several buffers.
    """
    return Way(NONE, _buckets(shapes, on_gpu), small=0)


def half(
    shapes: Shapes, *, on_gpu: bool = False, encoding: Spread = NOTHING, summing: Spread = NOTHING
) -> Way:
    """Return the way of fp16: buffers of half the bytes."""
    sizes = tuple(size // 2 for size in _buckets(shapes, on_gpu))
    return Way(FP16, sizes, encoding=encoding, summing=summing)


def _buckets(shapes: Shapes, are_several: bool) -> tuple[int, ...]:
    """Return the bytes of the buffers in which gradients are reduced."""
    sizes = {str(number): 4 * prod(shape) for number, shape in enumerate(shapes)}
    buckets = divide(dict(reversed(sizes.items())), are_several)
    return tuple(sum(sizes[name] for name in names) for names in buckets)


def low_rank(shapes: Shapes, rank: int, encoding: Spread = NOTHING) -> Way:
    """Return the way of PowerSGD after the warm-up: the products and other gradients first, then the factors.

    The metrics travel in the last message.
    """
    products = factors = others = 0
    for shape in shapes:
        matrix = matrix_shape(shape, rank)
        if matrix is None:
            others += prod(shape)
        else:
            products += matrix[0] * rank
            factors += matrix[1] * rank
    sizes = [4 * (products + others), 4 * factors]
    agreements = 2 if factors else 1
    sent = tuple(size for size in sizes if size)
    return Way(f"powersgd:{rank}", sent, small=0, agreements=agreements, encoding=encoding)


def local_steps(shapes: Shapes, every: int, slots: int) -> Way:
    """Return the way of local steps: the parameters and what the optimizer keeps, and then the metrics.

    Args:
        shapes: of the parameters.
        every: steps from one synchronisation to the next.
        slots: tensors of a parameter's size that the optimizer keeps for it.
    """
    tensors = [4 * prod(shape) for shape in shapes for _ in range(1 + slots)]
    parts = in_parts([("", size) for size in tensors])
    sizes = tuple(sum(tensors[place] for place in part) for part in parts)
    return Way(f"sync-every {every}", sizes, agreements=len(sizes) + 1, every=every)


def slots_of(optimizer: str, momentum: float) -> int:
    """Return how many tensors of a parameter's size a built-in optimizer keeps for it."""
    if optimizer in ("adamw", "lamb"):
        return 2
    return 1 if momentum else 0
