"""What a model computes for a few drawn inputs, by which a checkpoint's reader sees that code has changed."""

import zlib
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from hvdtrain.backends.base import Backend
from hvdtrain.backends.objective.gathering import parted
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.numeric import distance, leaves_of
from hvdtrain.workers.seeding import random_state_kept
from hvdtrain.workers.wire_types import travels

_SAMPLES = 4
_MOST_VALUES = 8  # different whole numbers of an array that are drawn from
_MOST_OUTPUTS = 32
_MOST_NUMBERS = 1 << 24  # of one sample; larger ones are not drawn
# relative to the norm: far above rounding on one machine, on others, and in half precision
_SAME_MACHINE, _OTHER_MACHINE, _HALF = 1e-3, 1e-2, 5e-2

_Numbers = Annotated[list[float | None], Field(max_length=_MOST_OUTPUTS)]


@travels
class ArrayForm(BaseModel):
    """What is drawn in place of an array: numbers of its type, in its shape and range."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: Annotated[str, Field(pattern=r"^(bool|u?int\d+|float\d+)$")]  # the type
    # that of a sample
    shape: Annotated[list[Annotated[int, Field(ge=0, le=_MOST_NUMBERS)]], Field(max_length=16)]
    low: float = 0.0  # the smallest of its floating-point numbers
    high: float = 0.0  # the largest
    values: Annotated[list[int], Field(max_length=_MOST_VALUES)] = []  # some of its whole numbers


@travels
class OutputsDigest(BaseModel):
    """What a model computed for drawn inputs when its checkpoint was saved."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    arrays: dict[str, ArrayForm]  # what was drawn, by name
    outputs: _Numbers  # some of the model's outputs, rounded; None stands for one that is not finite
    size: int  # the number of all its outputs
    loss: _Numbers  # the loss of each sample likewise; empty if it could not be computed
    averaged: bool  # whether the model had the moving average of its weights
    precision: str  # that of the job
    framework: str  # the framework
    computed_by: str  # its version and device


def forms_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, ArrayForm]:
    """Return what is drawn in place of the arrays (samples, ...) of a batch; empty if one cannot be drawn."""
    forms = {}
    for name, array in arrays.items():
        shape = list(array.shape[1:])
        if array.dtype.kind not in "biuf" or np.prod(shape) > _MOST_NUMBERS:
            return {}
        if array.dtype.kind == "f":
            finite = array[np.isfinite(array)]
            low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
            forms[name] = ArrayForm(dtype=str(array.dtype), shape=shape, low=low, high=high)
            continue
        found = np.unique(array)
        places = np.linspace(0, len(found) - 1, min(len(found), _MOST_VALUES)).astype(int)
        forms[name] = ArrayForm(dtype=str(array.dtype), shape=shape, values=list(map(int, found[places])))
    return forms


def digest_of(
    backend: Backend, config: Config, forms: Mapping[str, ArrayForm], averaged: bool
) -> OutputsDigest | None:
    """Collective. Evaluate the backend's model for drawn inputs, which changes nothing; None if it fails."""
    if config.stages > 1 or not forms or any(np.prod(form.shape) > _MOST_NUMBERS for form in forms.values()):
        return None
    arrays = {}  # a pure function of the forms
    for name, form in forms.items():
        random, shape = np.random.RandomState(zlib.crc32(name.encode())), (1, _SAMPLES, *form.shape)
        if form.values:
            drawn = np.asarray(form.values)[random.randint(len(form.values), size=shape)]
        else:
            drawn = form.low + (form.high - form.low) * random.random_sample(shape)
        arrays[name] = drawn.astype(form.dtype)
    weights, indices = np.ones((1, _SAMPLES), np.float32), np.arange(_SAMPLES)[None]
    batch = HostBatch(0, arrays, weights, total_weight=float(_SAMPLES), indices=indices)
    # the loss must not depend on the number of workers, nor later draws on whether a checkpoint is saved
    with random_state_kept(), parted():
        found = backend.dry_run(batch, training=False)
    outputs = [leaf.reshape(-1).astype(np.float64) for leaf in leaves_of(found.outputs)]
    flat = np.concatenate(outputs) if outputs else np.zeros(0)
    if "loss" not in found.values and not flat.size:
        return None
    places = np.linspace(0, flat.size - 1, min(flat.size, _MOST_OUTPUTS)).astype(int)
    return OutputsDigest(
        arrays=dict(forms),
        outputs=_rounded(flat[places]),
        size=flat.size,
        loss=_rounded(np.asarray(found.values.get("loss", []), np.float64)),
        averaged=averaged,
        precision=config.precision,
        framework=config.framework,
        computed_by=backend.info.description,
    )


def describe_changes(
    before: OutputsDigest | None, path: str, backend: Backend, config: Config, averaged: bool
) -> list[str]:
    """Collective. Return sentences on how the model computes something else than its checkpoint's did."""
    if before is None or before.averaged != averaged:
        return []
    now = digest_of(backend, config, before.arrays, averaged)
    if now is None:
        return []
    is_other = before.computed_by != now.computed_by
    where = f" It was saved with {before.computed_by}; this is {now.computed_by}." if is_other else ""
    tolerance = _OTHER_MACHINE if is_other else _SAME_MACHINE
    if {before.precision, now.precision} != {"fp32"}:
        tolerance = _HALF
    then, same = f"than when checkpoint {path} was saved", "for the same drawn inputs"
    changed = f" Has its code changed?{where}"
    is_same_framework = before.framework == now.framework  # other layouts in the other one
    old, new = (np.asarray(one.outputs, np.float64) for one in (before, now))
    if is_same_framework and before.size != now.size:
        return [f"the model has {now.size} outputs for drawn inputs, {before.size} {then}.{where}"]
    if is_same_framework and (off := distance(old, new)) > tolerance:
        place = int(np.nanargmax(np.abs(new - old)))
        return [
            f"the model computes something else {then}: its outputs {same} differ by {off:.1%}, "
            f"such as {new[place]:.4g} for {old[place]:.4g}.{changed}"
        ]
    old, new = (np.asarray(one.loss, np.float64) for one in (before, now))
    if old.size == new.size and distance(old, new) > tolerance:
        what = "the loss computes" if is_same_framework else "the model or the loss computes"
        means = f"{np.nanmean(new):.4g} for {np.nanmean(old):.4g}"
        return [f"{what} something else {then}: {means} {same}.{changed}"]
    return []


def _rounded(values: NDArray[np.float64]) -> list[float | None]:
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]
