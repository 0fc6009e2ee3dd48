"""The messages in which a job exchanges what its workers learn."""

from collections.abc import Iterable, Sequence
from math import prod

from hvdtrain.backends.portable.buckets import divide
from hvdtrain.backends.reduction.local_steps import in_parts
from hvdtrain.backends.reduction.low_rank import matrix_shape
from hvdtrain.compression import rank_of
from hvdtrain.config import Config
from hvdtrain.tools.bench.forecast import Way

Shapes = Iterable[tuple[int, ...]]


def way_of(config: Config, shapes: Sequence[tuple[int, ...]], *, on_gpu: bool) -> Way:
    """Return the messages of a step.

    Args:
        config: the config of the job.
        shapes: of the parameters.
        on_gpu: whether the job computes on GPUs: then there may be several buffers of gradients.
    """
    if config.sync_every is not None:
        slots = 2 if config.optimizer in ("adamw", "lamb") else int(bool(config.momentum))
        return local_steps(shapes, config.sync_every, slots)
    rank = rank_of(config.compression)
    if rank is not None:
        return low_rank(shapes, rank)
    return buffers(shapes, config.compression, on_gpu=on_gpu)


def buffers(shapes: Shapes, compression: str = "none", *, on_gpu: bool = False) -> Way:
    """Return the way of gradients in buffers; in fp32 the metrics travel with them."""
    sizes = {str(number): 4 * prod(shape) for number, shape in enumerate(shapes)}
    buckets = divide(dict(reversed(sizes.items())), on_gpu)
    share = 2 if compression == "fp16" else 1
    sent = tuple(sum(sizes[name] for name in names) // share for names in buckets)
    return Way(compression, sent, small=share - 1)


def low_rank(shapes: Shapes, rank: int) -> Way:
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
    return Way(f"powersgd:{rank}", tuple(filter(None, sizes)), agreements=2 if factors else 1)


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
    return Way(f"sync-every {every}", sizes, small=1, agreements=len(sizes) + 1, every=every)
