"""PowerSGD: which gradients travel as two thin matrices, where they start, and their names in the state.

With M_i the gradient of worker i, its part of the mean, plus its error, and Q orthonormal::

    P = orthonormal(sum of M_i Q);  Q_i = M_i^T P;  what is returned: P (sum of Q_i)^T
    error of worker i = M_i - P Q_i^T;  Q of the next step = orthonormal(sum of Q_i)

All of it is linear in the parts: what is returned and the sum of the errors depend on the sum of the M_i
alone, so that the curve does not depend on the number of workers. One worker alone does the same.

Source: Vogels et al. 2019 (arXiv:1905.13727).
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.portable.names import KEPT
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.reduction import GradientReducer, kept_in
from hvdtrain.config import Config
from hvdtrain.config.values import rank_of
from hvdtrain.data.order import mix
from hvdtrain.errors import TaskError

# a column whose part that is its own is smaller than this, relative to the longest, is rounding of fp32
_LEAST_PART = 1e-5
_EXPONENT_BITS = 0x7FF << 52  # of a number of fp64: without the others, it is a power of two
_ERROR = f"{KEPT}/error/"
_LEAST_GAIN = 2  # the two thin matrices have fewer numbers than the gradient by more than this factor


def matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """Return rows and columns, the fewest, of a gradient as a matrix; None if it travels uncompressed."""
    divided = [(prod(shape[:axis]), prod(shape[axis:])) for axis in range(1, len(shape))]
    rows, columns = min(divided, key=sum, default=(0, 0))
    return (rows, columns) if _LEAST_GAIN * rank * (rows + columns) < rows * columns else None


Matrices = Sequence[NDArray[Any]]


def orthonormal(matrices: Matrices, refill: Matrices | None = None) -> list[NDArray[np.float32]]:
    """Return matrices with orthonormal columns that span the same space; others are zero, or ``refill``'s."""
    if not matrices:
        return []
    with np.errstate(all="ignore"):
        found = _orthonormal_once([matrix.astype(np.float64) for matrix in matrices])
        if refill is not None:
            found = _orthonormal_once([m + r * (m == 0).all(0) for m, r in zip(found, refill, strict=True)])
        return [matrix.astype(np.float32) for matrix in found]


def _orthonormal_once(matrices: Matrices) -> list[NDArray[Any]]:
    """Do so once, for all matrices together: Gram-Schmidt on the products of their columns."""
    matrices, products = _exact_products(matrices)
    unit = np.eye(products.shape[-1])
    turn = np.broadcast_to(unit, products.shape)
    least = _LEAST_PART**2 * np.diagonal(products, axis1=1, axis2=2).max(1)
    for j in range(len(unit)):
        # column j is divided by its length, and taken out of those after it
        own = products[:, j, j]
        usable = (own > least) | np.isnan(own)
        scale = np.where(usable, 1 / np.sqrt(own), 0.0)[:, None]
        row = unit[j] * scale - products[:, j] * scale**2 * (np.arange(len(unit)) > j)
        change = np.diag(1 - unit[j]) + unit[j][:, None] * row[:, None]
        turn = turn @ change
        products = np.swapaxes(change, 1, 2) @ products @ change
    return [matrix @ turn[i] for i, matrix in enumerate(matrices)]


def _exact_products(matrices: Matrices) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """Return matrices in fixed point, and the products of their columns, of which no sum is rounded.

    So it does not matter in which order they are added, which depends on the number of threads: workers that
    have different numbers of them get the same. Each number has two parts, of which all products are whole:
    of so few bits that sums of products, which are smaller than 2 ** (bits + 1), are exact in fp64.
    """
    rows, rank = [len(matrix) for matrix in matrices], matrices[0].shape[1]
    bits, ends = (51 - (max(rows) - 1).bit_length()) // 2, np.cumsum(rows)[:-1]
    largest = np.stack([np.abs(matrix).max(0) for matrix in matrices])
    unit = (largest.view(np.int64) & _EXPONENT_BITS).view(np.float64)
    unit = np.where(unit > 0, unit, 1.0) * 2.0**-bits
    units = np.repeat(unit, rows, 0)
    scaled = np.concatenate(matrices) / units
    high = np.rint(scaled)
    low = np.rint((scaled - high) * 2.0**bits)
    whole = np.stack([part.T @ part for part in np.split(np.concatenate((high, low), 1), ends)])
    mixed = whole[:, :rank, rank:]
    mixed = (mixed + np.swapaxes(mixed, 1, 2)) * 2.0**-bits
    products = whole[:, :rank, :rank] + mixed + whole[:, rank:, rank:] * 4.0**-bits
    fixed = (high + low * 2.0**-bits) * units
    return np.split(fixed, ends), products * unit[:, :, None] * unit[:, None, :]


def first_factor(path: str, columns: int, rank: int, seed: int) -> NDArray[np.float32]:
    """Return the matrix Q that a parameter begins with, (columns, rank): orthonormal and random."""
    key = mix(seed, *f"{KEPT}/q/{path}".encode())
    # RandomState's stream is frozen by numpy's compatibility policy; Generator's is not
    random = np.random.RandomState([key & 0xFFFFFFFF, key >> 32])
    q, r = np.linalg.qr(random.standard_normal((columns, rank)))
    return np.asarray(q * np.sign(np.diag(r)), np.float32)


def has_warmup(config: Config) -> bool:
    """Return whether the learning rate has a warm-up, during which gradients are not compressed."""
    steps = config.warmup_steps
    return bool(config.warmup_epochs if steps is None else steps)


class CommonLowRank(GradientReducer):
    """What the reducers of both frameworks share."""

    _matrices: dict[int, Any]  # by the identity of a parameter
    _sizes: dict[int, int]  # bytes of all parameters, likewise
    _all: list[Any]  # the matrices, see ``_Matrix`` of the frameworks
    # collective: (name, tensor, whether it is a part) -> a copy; of parts the sum, of which a part is left
    _read: Callable[[str, Any, bool], Any]
    _set: Callable[[Any, NDArray[np.float32]], None]  # sets what is kept
    _make_matrices: Callable[[list[Any], int], None]  # of gradients that travel as two, by the seed

    def __init__(self, config: Config, workers: Any, fields: Iterable[Any], loss_scale: Any = None) -> None:
        super().__init__(workers)
        self._rank, self._has_warmup = rank_of(config.compression) or 1, has_warmup(config)
        self._loss_scale = loss_scale  # None, or what has multiplied the gradients
        self._make_matrices(list(fields), config.seed)

    @classmethod
    def of(cls, config: Config, workers: Any, fields: Iterable[Any] = (), loss_scale: Any = None) -> Self:
        """Return the one that a config requests."""
        return cls(config, workers, fields, loss_scale)

    @property
    def tensors(self) -> dict[str, Any]:
        """The errors, what this worker has not sent yet, and Q, by portable name."""
        errors = {f"{_ERROR}{m.path}": m.error for m in self._all}
        return errors | {f"{KEPT}/q/{m.path}": m.q for m in self._all}

    def state(self) -> PortableState:
        """Collective. Return what it keeps: of errors the sum, of which each worker continues with a part."""
        read = {name: self._read(name, one, name.startswith(_ERROR)) for name, one in self.tensors.items()}
        firsts = self._firsts
        return {name: np.array(one, order="C").reshape(firsts[name].shape) for name, one in read.items()}

    def load(self, state: PortableState) -> None:
        """Continue from what a whole state has of this, or from the beginning. Local: no collective."""
        found, firsts = kept_in(state) if self._all else {}, self._firsts
        shapes, own = ({name: tuple(a.shape) for name, a in arrays.items()} for arrays in (found, firsts))
        if found and shapes != own:
            name = min(n for n in {*shapes, *own} if shapes.get(n) != own.get(n))
            raise TaskError(
                f"the state of PowerSGD does not fit the model: {name} must be {own.get(name, 'absent')}, is "
                f"{shapes.get(name, 'absent')}",
                "Resume with --compression none, which drops it, or use --init.",
            )
        for name, tensor in self.tensors.items():
            parts = self._workers.size if name.startswith(_ERROR) else 1
            numbers = np.asarray(found.get(name, firsts[name]), np.float32).reshape(tuple(tensor.shape))
            self._set(tensor, np.divide(numbers, parts, dtype=np.float32))

    @property
    def _firsts(self) -> PortableState:
        errors = {f"{_ERROR}{m.path}": np.zeros(m.portable_shape, np.float32) for m in self._all}
        return errors | {f"{KEPT}/q/{m.path}": m.first for m in self._all}

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        sent = sum(4 * self._rank * sum(matrix.shape) for matrix in self._all)
        sent += sum(size for key, size in self._sizes.items() if key not in self._matrices)
        whole = sum(self._sizes.values())
        after = ", uncompressed during the warm-up" if self._has_warmup else ""
        sizes = f"{sent / 1e6:.3g} MB of {whole / 1e6:.3g} MB a step ({100 * sent / max(1, whole):.2g} %)"
        return f"fp32, sent by PowerSGD of rank {self._rank}: {sizes}{after}"
