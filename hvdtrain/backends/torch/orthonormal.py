"""Orthonormal matrices of PowerSGD in PyTorch, the same bits with any number of threads."""

from collections.abc import Sequence

import torch

from hvdtrain.backends.reduction.low_rank import EXPONENT_BITS, LEAST_PART, part_bits


def orthonormal(
    matrices: Sequence[torch.Tensor], refill: Sequence[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Return matrices whose columns are orthonormal and span the same space, by Gram-Schmidt in fp64.

    A column that depends on those before it becomes zero; with ``refill``, that column of it.

    Args:
        matrices: the matrices, of the same number of columns.
        refill: orthonormal matrices of the same shapes.
    """
    if not matrices:
        return []
    wide = [matrix.double() for matrix in matrices]
    found = _orthonormal_once(wide)
    if refill is not None:
        missing = [torch.where((matrix == 0).all(0), 1.0, 0.0) for matrix in found]
        filled = [m + r * gap for m, r, gap in zip(found, refill, missing, strict=True)]
        found = _orthonormal_once(filled)
    return [matrix.to(matrices[0].dtype) for matrix in found]


def _orthonormal_once(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Do so once, for all matrices together: Gram-Schmidt on the products of their columns."""
    matrices, products = _exact_products(matrices)
    unit = torch.eye(products.shape[-1], dtype=products.dtype, device=products.device)
    turn = unit.expand_as(products)
    least = LEAST_PART**2 * products.diagonal(dim1=1, dim2=2).amax(1)
    for j in range(len(unit)):
        # column j is divided by its length, and taken out of those after it
        own = products[:, j, j]
        usable = (own > least) | own.isnan()
        scale = torch.where(usable, own.rsqrt(), 0.0)[:, None]
        later = (torch.arange(len(unit), device=unit.device) > j).to(unit.dtype)
        row = unit[j] * scale - products[:, j] * scale**2 * later
        change = torch.diag(1 - unit[j]) + unit[j][:, None] * row[:, None]
        turn = turn @ change
        products = change.mT @ products @ change
    return [matrix @ turn[i] for i, matrix in enumerate(matrices)]


def _exact_products(matrices: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return matrices in fixed point, and the products of their columns, of which no sum is rounded.

    So it does not matter in which order they are added, which depends on the number of threads: workers that
    have different numbers of them get the same. Each number has two parts, of which all products are whole.
    """
    rows = [len(matrix) for matrix in matrices]
    bits, rank = part_bits(max(rows)), matrices[0].shape[1]
    joined = torch.cat(list(matrices))
    largest = torch.stack([part.amax(0) for part in torch.split(joined.abs(), rows)])
    unit = (largest.view(torch.int64) & EXPONENT_BITS).view(torch.float64)
    unit = torch.where(unit > 0, unit, 1.0) * 2.0**-bits
    units = torch.cat([one.expand(count, -1) for one, count in zip(unit, rows, strict=True)])
    high = joined.div_(units).round()
    low = joined.sub_(high).mul_(2.0**bits).round_()
    whole = torch.stack([part.T @ part for part in torch.split(torch.cat((high, low), 1), rows)])
    mixed = whole[:, :rank, rank:]
    products = whole[:, :rank, :rank] + (mixed + mixed.mT) * 2.0**-bits + whole[:, rank:, rank:] * 4.0**-bits
    fixed = low.mul_(2.0**-bits).add_(high).mul_(units)
    return list(torch.split(fixed, rows)), products * unit[:, :, None] * unit[:, None, :]
