"""Orthonormal matrices of PowerSGD in TensorFlow, the same bits with any number of threads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.reduction.low_rank import EXPONENT_BITS, LEAST_PART, part_bits

Tensor = Any


def orthonormal(matrices: Sequence[Tensor], refill: Sequence[Any] | None = None) -> list[Tensor]:
    """Return matrices whose columns are orthonormal and span the same space, by Gram-Schmidt in fp64.

    A column that depends on those before it becomes zero; with ``refill``, that column of it.

    Args:
        matrices: the matrices, of the same number of columns.
        refill: orthonormal matrices of the same shapes.
    """
    if not matrices:
        return []
    wide = [tf.cast(matrix, tf.float64) for matrix in matrices]
    found = _orthonormal_once(wide)
    if refill is not None:
        missing = [tf.cast(tf.reduce_all(tf.equal(matrix, 0), 0), tf.float64) for matrix in found]
        filled = [m + np.float64(r) * gap for m, r, gap in zip(found, refill, missing, strict=True)]
        found = _orthonormal_once(filled)
    return [tf.cast(matrix, matrices[0].dtype) for matrix in found]


def _orthonormal_once(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Do so once, for all matrices together: Gram-Schmidt on the products of their columns."""
    matrices, products = _exact_products(matrices)
    unit = np.eye(products.shape[-1])
    turn = tf.constant(np.broadcast_to(unit, (len(matrices), *unit.shape)))
    least = LEAST_PART**2 * tf.reduce_max(tf.linalg.diag_part(products), 1)
    for j in range(len(unit)):
        # column j is divided by its length, and taken out of those after it
        own = products[:, j, j]
        usable = tf.logical_or(own > least, tf.math.is_nan(own))
        scale = tf.where(usable, tf.math.rsqrt(own), tf.zeros_like(own))[:, None]
        later = (np.arange(len(unit)) > j).astype(np.float64)
        row = unit[j] * scale - products[:, j] * scale**2 * later
        change = np.diag(1 - unit[j]) + unit[j][:, None] * row[:, None]
        turn = turn @ change
        products = tf.matmul(change, products, transpose_a=True) @ change
    return [matrix @ turn[i] for i, matrix in enumerate(matrices)]


def _exact_products(matrices: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return matrices in fixed point, and the products of their columns, of which no sum is rounded.

    So it does not matter in which order they are added, which depends on the number of threads: workers that
    have different numbers of them get the same. Each number has two parts, of which all products are whole.
    """
    rows = [matrix.shape[0] for matrix in matrices]
    bits, rank = part_bits(max(rows)), matrices[0].shape[1]
    joined = tf.concat(matrices, 0)
    largest = tf.stack([tf.reduce_max(part, 0) for part in tf.split(tf.abs(joined), rows)])
    kept = tf.bitwise.bitwise_and(tf.bitcast(largest, tf.int64), np.int64(EXPONENT_BITS))
    unit = tf.bitcast(kept, tf.float64)
    unit = tf.where(unit > 0, unit, tf.ones_like(unit)) * 2.0**-bits
    units = tf.gather(unit, np.repeat(np.arange(len(rows)), rows))
    scaled = joined / units
    high = tf.round(scaled)
    low = tf.round((scaled - high) * 2.0**bits)
    parts = tf.split(tf.concat((high, low), 1), rows)
    whole = tf.stack([tf.matmul(part, part, transpose_a=True) for part in parts])
    mixed = whole[:, :rank, rank:]
    mixed += tf.linalg.matrix_transpose(mixed)
    products = whole[:, :rank, :rank] + mixed * 2.0**-bits + whole[:, rank:, rank:] * 4.0**-bits
    fixed = (high + low * 2.0**-bits) * units
    return tf.split(fixed, rows), products * unit[:, :, None] * unit[:, None, :]
