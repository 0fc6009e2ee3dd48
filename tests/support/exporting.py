"""Batches of real samples, as an export takes them: several sizes, the largest first."""

import numpy as np

from hvdtrain.data.feed import HostBatch

BATCH, LENGTH = 8, 12


def floats() -> dict:
    random = np.random.RandomState(0)
    return {
        "inputs": random.randn(BATCH, 6).astype("float32"),
        "targets": random.randn(BATCH).astype("float32"),
    }


def tokens(size: int = BATCH, length: int = LENGTH) -> dict:
    """Return tokens with a mask that ends at different places, and labels."""
    random = np.random.RandomState(0)
    ends = random.randint(1, length + 1, (size, 1))
    return {
        "input_ids": random.randint(0, 50, (size, length)),
        "attention_mask": (np.arange(length) < ends).astype("int64"),
        "labels": random.randint(0, 3, size),
    }


def host_batches(arrays: dict) -> list[HostBatch]:
    """Return batches of 8, 8, 2 and 1 of these samples."""
    places = (np.arange(BATCH), np.arange(BATCH)[::-1], np.array([5, 6]), np.array([3]))
    return [
        HostBatch(
            step=0,
            arrays={name: np.ascontiguousarray(array[indices])[None] for name, array in arrays.items()},
            weights=np.ones((1, len(indices)), np.float32),
            total_weight=float(len(indices)),
            indices=indices[None],
        )
        for indices in places
    ]
