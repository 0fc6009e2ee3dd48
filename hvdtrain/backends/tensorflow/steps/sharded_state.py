"""Sharded state in TensorFlow as portable state: gathered part by part on rank 0, and given out again."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.portable.initial_values import PREFIX
from hvdtrain.backends.portable.names import check_unique
from hvdtrain.backends.portable.training_state import CommonShardedState, ReadyState, ShardedSlot, Spool
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import Bucket, ShardedParameters
from hvdtrain.backends.tensorflow.state.ema import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.steps.formulas import SGD
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.sharded_optimizer import ShardedMovingAverage

_STEP = "optimizer/step"


class ShardedState(CommonShardedState, TrainingState):
    """Model and sharded optimizer as portable state.

    Args:
        model: the model's variables.
        optimizer: one of hvdtrain's, over this worker's segments.
        ema: the moving average of the weights.
        shards: the parameters.
    """

    def __init__(
        self, model: ModelState, optimizer: Any, ema: ShardedMovingAverage, shards: ShardedParameters
    ) -> None:
        super().__init__(model, {}, ema)
        self._shards = shards
        self._steps = {} if isinstance(optimizer, SGD) else {_STEP: optimizer.iterations}
        self._count_names = list(self._steps)
        place = {id(segment): number for number, segment in enumerate(shards.segments)}
        self._sharded = [
            ShardedSlot(f"optimizer/{name}", False, lambda s, own=variables: native(own[place[id(s)]]))  # type: ignore[misc]
            for name, variables in optimizer.slots.items()
        ]
        if ema.is_kept:
            self._sharded.append(ShardedSlot(PREFIX, True, ema.of))

    def load(self, state: StateArrays) -> None:
        """Check a whole portable state, and load the model's part of it; ``distribute`` gives out the rest.

        Raises:
            TaskError: If the state does not fit.
        """
        super().load(state)
        for name, count in self._steps.items():
            count.assign(int(state[name]))

    def _fields(self, slot: ShardedSlot) -> list[Field]:
        fields = [replace(f, prefix=slot.prefix) for bucket in self._shards.buckets for f in bucket.fields]
        check_unique((field.name, field.path) for field in fields)
        return fields

    def _scatter(self, slot: ShardedSlot, state: PortableState) -> None:
        self._shards.scatter_from_root(
            lambda bucket: _filled(bucket, slot, state),
            lambda segment, values: slot.of(segment).assign(values),
            f"slot.{slot.prefix}",
        )

    def _make_room(self, spool: Spool) -> dict[str, NDArray[Any]]:
        return {
            field.name: spool.empty(field.shape, bucket.dtype.as_numpy_dtype)
            for slot in self._sharded
            for bucket in self._shards.buckets
            for field in (replace(f, prefix=slot.prefix) for f in bucket.fields)
        }

    def _put(self, room: dict[str, NDArray[Any]], number: int, bucket: Bucket, flat: NDArray[Any]) -> None:
        for field, numbers in bucket.parted(flat):
            room[f"{self._sharded[number].prefix}/{field.path}"][...] = numbers.reshape(field.shape)

    def _gather_counts(self) -> PortableState:
        return {name: np.asarray(count.numpy(), np.int64) for name, count in self._steps.items()}

    def _gathered(self, kept: PortableState, room: dict[str, NDArray[Any]], spool: Spool) -> ReadyState:
        for field in self.model.fields:
            room[field.name] = spool.keep(field.read())
        return ReadyState({**room, **kept})


def _filled(bucket: Bucket, slot: ShardedSlot, state: PortableState) -> NDArray[Any]:
    """Return a slot's values of a bucket as a vector."""
    flat = np.zeros(bucket.layout.length, bucket.dtype.as_numpy_dtype)
    for field, numbers in bucket.parted(flat):
        numbers[...] = state[f"{slot.prefix}/{field.path}"].reshape(-1)
    return flat


def make_state(
    model: ModelState,
    optimizers: Mapping[str, Any],
    ema: ExponentialMovingAverage,
    local: Any,
    shards: ShardedParameters | None,
) -> TrainingState:
    """Return a job's state.

    Args:
        model: the model's variables.
        optimizers: by name.
        ema: the moving average of the weights.
        local: the local steps; None if there are none.
        shards: the parameters; None if each worker updates all of them.
    """
    if shards is None:
        return TrainingState(model, optimizers, ema, local)
    assert isinstance(ema, ShardedMovingAverage)
    return ShardedState(model, optimizers[MAIN], ema, shards)
