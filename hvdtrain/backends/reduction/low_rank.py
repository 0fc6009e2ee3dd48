"""PowerSGD: which gradients travel as two thin matrices, where they start, and their names in the state.

With M_i the gradient of worker i, its part of the mean, plus its error, and Q orthonormal::

    P = orthonormal(sum of M_i Q);  Q_i = M_i^T P;  what is returned: P (sum of Q_i)^T
    error of worker i = M_i - P Q_i^T;  Q of the next step = orthonormal(sum of Q_i)

All of it is linear in the parts: what is returned and the sum of the errors depend on the sum of the M_i
alone, so that the curve does not depend on the number of workers. One worker alone does the same.

Source: Vogels et al. 2019 (arXiv:1905.13727).
"""

from collections.abc import Iterable
from math import prod

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.records import PortableState
from hvdtrain.config import Config
from hvdtrain.data.order import mix
from hvdtrain.errors import TaskError

PREFIX = "compression"
_ERROR, _FACTOR = f"{PREFIX}/error/", f"{PREFIX}/q/"
# a column whose part that is its own is smaller than this, relative to the longest, is rounding of fp32
LEAST_PART = 1e-5
EXPONENT_BITS = 0x7FF << 52  # of a number of fp64: without the others, it is a power of two
_LEAST_GAIN = 2  # the two thin matrices have fewer numbers than the gradient by more than this factor


def matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """Return rows and columns of a gradient as a matrix; None if it travels uncompressed.

    The axes of the portable array, in their order, are divided where rows + columns is least.

    Args:
        shape: the portable array's.
        rank: columns of the thin matrices.
    """
    divided = [(prod(shape[:axis]), prod(shape[axis:])) for axis in range(1, len(shape))]
    rows, columns = min(divided, key=sum, default=(0, 0))
    return (rows, columns) if _LEAST_GAIN * rank * (rows + columns) < rows * columns else None


def part_bits(rows: int) -> int:
    """Return how many bits of a column's numbers are multiplied at once.

    So few that sums of products of two such parts, which are smaller than 2 ** (bits + 1), are exact in fp64.
    """
    return (51 - (rows - 1).bit_length()) // 2


def first_factor(path: str, columns: int, rank: int, seed: int) -> NDArray[np.float32]:
    """Return the matrix Q that a parameter begins with, (columns, rank): orthonormal and random.

    Args:
        path: the parameter's portable name without "model/".
        columns: of its matrix.
        rank: columns of Q.
        seed: the config's.
    """
    key = mix(seed, *f"{_FACTOR}{path}".encode())
    # RandomState's stream is frozen by numpy's compatibility policy; Generator's is not
    random = np.random.RandomState([key & 0xFFFFFFFF, key >> 32])
    q, r = np.linalg.qr(random.standard_normal((columns, rank)))
    return np.asarray(q * np.sign(np.diag(r)), np.float32)


def error_name(path: str) -> str:
    """Return the name of a parameter's error in the portable state: what no step has sent yet."""
    return f"{_ERROR}{path}"


def factor_name(path: str) -> str:
    """Return the name of a parameter's Q in the portable state."""
    return f"{_FACTOR}{path}"


def split_state(state: PortableState) -> tuple[PortableState, PortableState]:
    """Return a portable state without what compression keeps, and what it keeps."""
    kept = {name: array for name, array in state.items() if name.startswith(f"{PREFIX}/")}
    return {name: array for name, array in state.items() if name not in kept}, kept


def fitting_state(
    state: PortableState, rank: int | None, rank_before: int | None
) -> tuple[PortableState, str]:
    """Return a checkpoint's state as a job can go on from it, and what the user should know of that.

    Args:
        state: the checkpoint's state.
        rank: the job's rank; None if it does not compress to low rank.
        rank_before: that of the job that wrote the checkpoint.
    """
    rest, kept = split_state(state)
    if rank is None:
        said = "what PowerSGD had not sent yet is dropped: this job does not use it" if kept else ""
        return rest, said
    if not kept:
        return rest, "the checkpoint has nothing of PowerSGD: its error starts from zero"
    if rank != rank_before:
        return rest, (
            f"what PowerSGD of rank {rank_before} had not sent yet is dropped, and rank {rank} starts anew"
        )
    return state, ""


def check_kept(kept: PortableState, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check what a state has of compression; it may have nothing.

    Raises:
        TaskError: If it is of another model.
    """
    found = {name: tuple(array.shape) for name, array in kept.items()}
    if kept and found != shapes:
        wrong = sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
        name = wrong[0]
        raise TaskError(
            f"the state of PowerSGD does not fit the model: {name} must be {shapes.get(name, 'absent')}, is "
            f"{found.get(name, 'absent')}",
            "Resume with --compression none, which drops it, or use --init.",
        )


def describe(
    rank: int, matrices: Iterable[tuple[int, int]], others: int, *, has_warmup: bool, all_numbers: int
) -> str:
    """Return how gradients travel, for the plan.

    Args:
        rank: columns of the thin matrices.
        matrices: rows and columns of the gradients that travel as two of them.
        others: bytes of the gradients that travel as they are.
        has_warmup: whether the learning rate has a warm-up.
        all_numbers: bytes of all gradients.
    """
    sent = sum(4 * rank * (rows + columns) for rows, columns in matrices) + others
    after = ", uncompressed during the warm-up" if has_warmup else ""
    share = 100 * sent / max(1, all_numbers)
    return (
        f"fp32, sent by PowerSGD of rank {rank}: {sent / 1e6:.3g} MB of {all_numbers / 1e6:.3g} MB a step "
        f"({share:.2g} %){after}"
    )


def has_warmup(config: Config) -> bool:
    """Return whether the learning rate has a warm-up, during which gradients are not compressed."""
    steps = config.warmup_steps
    return bool(config.warmup_epochs if steps is None else steps)
