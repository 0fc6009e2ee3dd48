"""Mixup and CutMix: training samples mixed with others, by draws that depend on seed, epoch and sample."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.augment import Keys, transform_keys, uniform
from hvdtrain.data.blocks import blocks_of
from hvdtrain.data.datasets import fetch
from hvdtrain.data.nesting import SEPARATOR
from hvdtrain.data.order import Draws
from hvdtrain.data.stream import Stream
from hvdtrain.errors import DataError
from hvdtrain.task import Arrays

# what a mixed batch has in addition: of each key but the inputs, the other sample's; and its share
OTHERS, SHARE = "mixed_", "mixing_share"
_POINTS = 4097
_CHANNELS = 4  # at most, to tell the axis of an image's channels


class Mixed:
    """A data set whose samples are mixed with others in training: Zhang et al. 2018, Yun et al. 2019.

    The other sample is any of the data set, so it does not depend on the batch or the worker.

    Args:
        dataset: the data set.
        mixup: alpha of mixup; 0 for none.
        cutmix: alpha of CutMix; 0 for none. With both, each sample has one of them, by chance.
    """

    def __init__(self, dataset: Any, mixup: float, cutmix: float) -> None:
        if isinstance(dataset, Stream):
            raise DataError(
                "mixup and cutmix need data with an index, and found a stream",
                "Mix in the task's train_collate, or leave them out.",
            )
        self._dataset, self._mixup, self._cutmix = dataset, mixup, cutmix
        self.blocks = blocks_of(dataset)
        self.draws: Any = getattr(dataset, "draws", None)
        if hasattr(dataset, "batch"):  # it may be read for several steps at once
            self.batch = lambda indices: fetch(dataset, indices)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return {name: array[0] for name, array in fetch(self._dataset, np.asarray([index])).items()}

    def augmented(self, indices: NDArray[np.int64], keys: Keys) -> Arrays:
        """Fetch many samples and their partners, and mix their inputs.

        Raises:
            DataError: If they have no inputs that can be mixed.
        """
        count = len(indices)
        numbers = uniform(transform_keys(keys, 0), 0)
        is_drawn = isinstance(self.draws, Draws)
        partners = self.draws.at(numbers) if is_drawn else (numbers * len(self)).astype(np.int64)
        own_keys = np.concatenate([keys, transform_keys(keys, 1)])
        all_keys = own_keys if hasattr(self._dataset, "augmented") else None
        both = fetch(self._dataset, np.concatenate([indices, partners]), all_keys)
        inputs = [name for name in both if name.partition(SEPARATOR)[0] == "inputs"]
        if not inputs:
            raise DataError(
                f"mixup and cutmix mix 'inputs'; samples have {sorted(both)}",
                "Name them: hvdtrain.as_dataset(data, inputs=...).",
            )
        draws = transform_keys(keys, 2)
        cuts = np.full(count, bool(self._cutmix))
        if self._mixup and self._cutmix:
            cuts = uniform(draws, 0) < 0.5
        # the share of the partner
        shares = 1 - np.where(
            cuts, beta(uniform(draws, 1), self._cutmix), beta(uniform(draws, 1), self._mixup)
        )
        pasted = np.zeros((count, 1, 1), bool)
        height = width = 0
        if self._cutmix:
            height, width = _sides(inputs, both)
            pasted = boxes(draws, shares, *(both["inputs"].shape[axis] for axis in (height, width)))
            pasted &= cuts[:, None, None]
            shares = np.where(cuts, pasted.mean((1, 2)), shares)
        result = {name: array[:count] for name, array in both.items()}
        result |= {OTHERS + name: array[count:] for name, array in both.items() if name not in inputs}
        result |= {name: _mixed(name, both[name], np.where(cuts, 0, shares)) for name in inputs}
        if cuts.any():
            shape = [
                size if axis in (0, height, width) else 1 for axis, size in enumerate(result["inputs"].shape)
            ]
            result["inputs"] = np.where(pasted.reshape(shape), both["inputs"][count:], result["inputs"])
        return {**result, SHARE: shares.astype(np.float32)}


def beta(uniforms: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Return numbers with the distribution Beta(alpha, alpha) for uniform ones in [0, 1); 1 for alpha 0.

    The inverse of the distribution function, which numpy integrates: with s = x**alpha it is smooth.
    """
    if not alpha:
        return np.ones_like(uniforms)
    s = np.linspace(0, 0.5**alpha, _POINTS)
    x = s ** (1 / alpha)
    density = (1 - x) ** (alpha - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    low = np.interp(np.minimum(uniforms, 1 - uniforms), below / below[-1] / 2, s) ** (1 / alpha)
    return np.where(uniforms < 0.5, low, 1 - low)


def boxes(keys: Keys, shares: NDArray[np.float64], height: int, width: int) -> NDArray[np.bool_]:
    """Return which pixels the box covers that takes a share of each image; less at the edges.

    Returns:
        (samples, height, width).
    """
    inside = []
    for draw, size in ((2, height), (3, width)):
        centre = np.floor(uniform(keys, draw) * size)[:, None]
        half = np.floor(size * np.sqrt(shares) / 2)[:, None]
        places = np.arange(size)[None]
        inside.append((places >= centre - half) & (places < centre + half))
    return inside[0][:, :, None] & inside[1][:, None, :]


def _mixed(name: str, both: NDArray[Any], shares: NDArray[np.float64]) -> NDArray[Any]:
    """Return the first half of an array, mixed with the second."""
    if both.dtype != np.uint8 and both.dtype.kind != "f":
        raise DataError(
            f"mixup and cutmix mix numbers; {name!r} holds {both.dtype}",
            "Convert it to float32 if it is no index, or mix embeddings in the task's own loss.",
        )
    own, other = np.split(both, 2)
    exact = np.result_type(both.dtype, np.float32)
    parts = shares.reshape(-1, *[1] * (both.ndim - 1)).astype(exact)
    mixed: NDArray[Any] = own * (1 - parts) + other * parts
    return np.rint(mixed).astype(np.uint8) if both.dtype == np.uint8 else mixed.astype(both.dtype)


def _sides(inputs: list[str], both: Arrays) -> tuple[int, int]:
    """Return the axes of an image's height and width."""
    shape = both[inputs[0]].shape
    if inputs == ["inputs"] and len(shape) == 3:
        return 1, 2
    if inputs == ["inputs"] and len(shape) == 4 and shape[3] <= _CHANNELS:
        return 1, 2
    if inputs == ["inputs"] and len(shape) == 4 and shape[1] <= _CHANNELS:
        return 2, 3
    raise DataError(
        f"cutmix cuts images with up to {_CHANNELS} channels, on the first or the last axis; inputs have "
        f"shape {shape[1:]}",
        "Use mixup.",
    )


def partner_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch, flat or nested, with what it holds of the samples that its own were mixed with."""
    others = {name.removeprefix(OTHERS): value for name, value in batch.items() if name.startswith(OTHERS)}
    return {**batch, **others}
