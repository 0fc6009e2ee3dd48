"""Sharded state in TensorFlow as portable state: gathered part by part on rank 0, and given out again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.portable.initial_values import PREFIX, has_ema
from hvdtrain.backends.portable.names import check_unique
from hvdtrain.backends.portable.training_state import Spool
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import Bucket, OwnSegment, ShardedParameters
from hvdtrain.backends.tensorflow.state.ema import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.steps.formulas import SGD
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.sharded_optimizer import ShardedMovingAverage
from hvdtrain.backends.workers import peer_errors

_STEP = "optimizer/step"


@dataclass(frozen=True)
class _Slot:
    """What every number of the parameters has one of.

    Attributes:
        prefix: what stands before the parameter in its portable name.
        is_ema: whether it is the moving average.
        of: returns this worker's part of it, a variable.
    """

    prefix: str
    is_ema: bool
    of: Callable[[OwnSegment], Any]


class ShardedState(TrainingState):
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
        place = {id(segment): number for number, segment in enumerate(shards.segments)}
        self._sharded = [
            _Slot(f"optimizer/{name}", False, lambda s, own=variables: native(own[place[id(s)]]))  # type: ignore[misc]
            for name, variables in optimizer.slots.items()
        ]
        if ema.is_kept:
            self._sharded.append(_Slot(PREFIX, True, ema.of))

    def load(self, state: StateArrays) -> None:
        """Check a whole portable state, and load the model's part of it; ``distribute`` gives out the rest.

        Raises:
            TaskError: If the state does not fit.
        """
        shapes = self.weight_shapes()
        for slot in self._sharded:
            if not slot.is_ema or has_ema(state):
                shapes |= {field.name: field.shape for field in self._fields(slot)}
        shapes |= dict.fromkeys(self._steps, ())
        self.check_fits(shapes, state)
        for field in self.model.fields:
            field.write(state)
        self.ema.restart()
        for name, count in self._steps.items():
            count.assign(int(state[name]))

    def distribute(self, state: PortableState | None) -> None:
        """Collective. Give every worker its part of the optimizer's slots and of the moving average.

        Args:
            state: the state on rank 0, which ``load`` has checked; not looked at on other ranks.
        """
        workers = self._shards.workers
        given = state if workers.rank == 0 and state is not None else {}
        with_ema = workers.broadcast_object(has_ema(given))
        with peer_errors():
            for slot in self._sharded:
                if slot.is_ema and not with_ema:
                    self.ema.restart()
                    continue
                self._shards.scatter_from_root(
                    lambda bucket, slot=slot: _filled(bucket, slot, given),  # type: ignore[misc]
                    lambda segment, values, slot=slot: slot.of(segment).assign(values),  # type: ignore[misc]
                    f"slot.{slot.prefix}",
                )

    def gather(self, kept: PortableState, folder: Path | None, is_root: bool) -> "ShardedSnapshot | None":
        """Collective. Copy the model, and what all workers keep, for rank 0 to read in another thread.

        Args:
            kept: what else belongs to the state, as arrays.
            folder: where the copy lies; in memory if None.
            is_root: whether this is rank 0.
        """
        spool, error = Spool(None), None
        room: dict[str, NDArray[Any]] = {}
        if is_root:
            try:
                spool = Spool(folder)
                room = self._make_room(spool)
            except OSError as found:  # such as no room on the disk
                error = found
        if not self._shards.workers.broadcast_object(error is None):
            return ShardedSnapshot({}, error) if is_root else None
        with peer_errors():
            for number, slot in enumerate(self._sharded):
                for bucket, flat in self._shards.gather_on_root(slot.of, f"state.{number}"):
                    if is_root:
                        for field, numbers in bucket.parted(flat):
                            room[f"{slot.prefix}/{field.path}"][...] = numbers.reshape(field.shape)
        if not is_root:
            return None
        for field in self.model.fields:
            room[field.name] = spool.keep(field.read())
        counts = {name: np.asarray(count.numpy(), np.int64) for name, count in self._steps.items()}
        return ShardedSnapshot({**room, **kept, **counts})

    def _fields(self, slot: _Slot) -> list[Field]:
        """Return a slot's portable arrays, with the parameters in place of its variables."""
        fields = [replace(f, prefix=slot.prefix) for bucket in self._shards.buckets for f in bucket.fields]
        check_unique((field.name, field.path) for field in fields)
        return fields

    def _make_room(self, spool: Spool) -> dict[str, NDArray[Any]]:
        """Make the arrays of all slots."""
        return {
            field.name: spool.empty(field.shape, bucket.dtype.as_numpy_dtype)
            for slot in self._sharded
            for bucket in self._shards.buckets
            for field in (replace(f, prefix=slot.prefix) for f in bucket.fields)
        }


class ShardedSnapshot:
    """A copy of a whole state.

    Args:
        state: the arrays.
        error: why there is no copy, if there is none.
    """

    def __init__(self, state: PortableState, error: OSError | None = None) -> None:
        self._state = state
        self._error = error

    def read(self) -> PortableState:
        """Return the copy.

        Raises:
            OSError: If there is none.
        """
        if self._error is not None:
            raise self._error
        return self._state


def _filled(bucket: Bucket, slot: _Slot, state: PortableState) -> NDArray[Any]:
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
