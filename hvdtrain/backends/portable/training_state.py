"""What the states of whole jobs of both frameworks share: the model's part of a portable state."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hvdtrain.backends.base import PendingState
from hvdtrain.backends.portable.initial_values import has_ema, with_initial_values
from hvdtrain.backends.portable.names import check_state
from hvdtrain.backends.records import PortableState, Shapes, StateArrays
from hvdtrain.backends.workers import peer_errors

_ALIGNED_BYTES = 64


class Spool:
    """Makes arrays in one temporary file of a folder, whose name is removed at once; in memory if it is None.

    The file takes room on the disk until the last of its arrays is gone, also if the process is killed.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None
        self._size = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".spool-")  # noqa: SIM115 - lives as long as this

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array whose values are undefined."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if self._file is None or not size:
            return np.empty(shape, kind)
        begin = self._size
        os.posix_fallocate(self._file.fileno(), begin, size)
        self._size = -(-(begin + size) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return np.memmap(self._file, kind, "r+", begin, shape)

    def keep(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of an array."""
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy


class ReadyState:
    """A portable state that is gathered already."""

    def __init__(self, state: PortableState | None, error: Exception | None = None) -> None:
        self._state = state
        self._error = error

    def read(self) -> PortableState:
        """Return the state; may be called once, in another thread."""
        if self._state is None:
            raise self._error or OSError("the state could not be gathered")
        state, self._state = self._state, None
        return state


class Keeper:
    """Takes arrays into a spool, to the last one; if the disk has no room for one, ``read`` raises that."""

    def __init__(self, folder: Path | None) -> None:
        self.error: Exception | None = None
        self._state: PortableState = {}
        try:
            self._spool = Spool(folder)
        except OSError as error:
            self.error = error

    def keep_all(self, arrays: Iterable[tuple[str, NDArray[Any]]]) -> None:
        """Take in arrays; of those of one name, the first."""
        try:
            for name, array in arrays:
                if self.error is None and name not in self._state:
                    self._state[name] = self._spool.keep(array)
        except Exception as error:  # such as no room on the disk: the others are in the next collective
            self.error = self.error or error

    def ready(self, others: PortableState | None = None) -> ReadyState:
        """Return what was taken in, and others."""
        return ReadyState(None if self.error else {**self._state, **(others or {})}, self.error)


class CommonState:
    """Model and optimizers as portable state, as far as no framework has a part in it."""

    framework: ClassVar[str]
    model: Any
    ema: Any  # the moving average of the weights
    _local: Any  # the local steps; None if there are none
    # (what reducers and layers keep) -> PendingState: copies everything off the device
    snapshot: Callable[..., PendingState]
    load: Callable[[StateArrays], None]  # loads a portable state, having checked all of it
    # (with_ema) -> the shapes of all arrays, by portable name
    shapes: Callable[[bool], dict[str, tuple[int, ...]]]
    arrays: Callable[[], Iterator[tuple[str, Any]]]  # yields all arrays with their portable names

    def check(self) -> None:
        """Check that everything the optimizers keep can be saved."""

    def private_names(self) -> list[str]:
        """Return the names of arrays that only this framework reads, and which a state may have."""
        return []

    def load_weights(self, weights: StateArrays, is_part: bool = False) -> None:
        """Load the model's part of a state, having checked it; averages and local steps start anew."""
        fields = [field for field in self.model.fields if not is_part or field.name in weights]
        self.check_fits({field.name: field.shape for field in fields}, weights)
        for field in fields:
            field.write(weights)
        self._restart()

    def check_fits(self, shapes: Shapes, state: StateArrays) -> None:
        """Check that a state has the arrays of these names and shapes."""
        check_state(shapes, state, self.framework)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's arrays, by portable name."""
        return {field.name: field.shape for field in self.model.fields}

    def load_initial(self, seed: int) -> None:
        """Draw the model's initial values by name, one array after the other."""
        for field in self.model.fields:
            field.write(with_initial_values({field.name: field.read()}, seed))
        self._restart()

    def gather(self, kept: PortableState, folder: Path | None, is_root: bool) -> PendingState | None:
        """Collective. Copy everything off the device, for rank 0 to read in another thread."""
        return self.snapshot(kept) if is_root else None

    def distribute(self, state: PortableState | None) -> None:
        """Collective. Give every worker what ``load`` has not loaded: nothing, if each keeps all."""

    def _restart(self) -> None:
        """Start the moving average and the local steps from the weights."""
        self.ema.restart()
        if self._local is not None:
            self._local.restart()

    @property
    def _outer_fields(self) -> list[Any]:
        return [] if self._local is None else list(self._local.fields)


@dataclass(frozen=True)
class ShardedSlot:
    """What every number of the parameters has one of."""

    prefix: str  # what stands before the parameter in its portable name
    is_ema: bool  # whether it is the moving average
    of: Callable[[Any], Any]  # returns this worker's part of it, of a segment


class CommonShardedState(CommonState):
    """Model and sharded optimizer as portable state, as far as no framework has a part in it."""

    _shards: Any
    _sharded: Sequence[ShardedSlot]
    _count_names: Sequence[str]  # of the counts of steps that all workers have in common
    # (slot) -> its portable arrays, with the parameters in place of what it consists of
    _fields: Callable[[ShardedSlot], Iterable[Any]]
    # (array, values by the identities of tensors) -> it and its private ones, of these values or the tensors
    _arrays: Callable[[Any, Mapping[int, Any]], Iterable[tuple[str, NDArray[Any]]]]
    # (array, values, state): copies the state's array into values, by the identities of the tensors
    _fill: Callable[[Any, Mapping[int, Any], PortableState], None]
    _gather_counts: Callable[[], PortableState]  # collective; returns the counts of steps

    def load(self, state: StateArrays) -> None:
        """Check a whole portable state, and load the model's part; ``distribute`` gives out the rest."""
        shapes = self.weight_shapes()
        for slot in self._sharded:
            if not slot.is_ema or has_ema(state):
                shapes |= {field.name: field.shape for field in self._fields(slot)}
        shapes |= dict.fromkeys(self._count_names, ())
        self.check_fits(shapes, state)
        for field in self.model.fields:
            field.write(state)
        self.ema.restart()

    def distribute(self, state: PortableState | None) -> None:
        """Collective. Give every worker its part of the optimizer's slots and of the moving average."""
        workers = self._shards.workers
        given = state if workers.rank == 0 and state is not None else {}
        with_ema = workers.broadcast_object(has_ema(given))
        with peer_errors():
            for slot in self._sharded:
                if slot.is_ema and not with_ema:
                    self.ema.restart()
                else:
                    self._scatter(slot, given)
            self._scatter_counts(given)

    def gather(self, kept: PortableState, folder: Path | None, is_root: bool) -> PendingState | None:
        """Collective. Copy the model, and what all workers keep, for rank 0 to read in another thread."""
        keeper = Keeper(folder if is_root else None)
        if not self._shards.workers.broadcast_object(keeper.error is None):
            return keeper.ready() if is_root else None
        with peer_errors():
            for number, slot in enumerate(self._sharded):
                self._gather_slot(number, slot, keeper if is_root else None)
            counts = self._gather_counts()
        if not is_root:
            return None
        for field in self.model.fields:
            keeper.keep_all(self._arrays(field, {}))
        return keeper.ready({**kept, **counts})

    def _gather_slot(self, number: int, slot: ShardedSlot, keeper: "Keeper | None") -> None:
        """Collective. Keep a slot's arrays on rank 0, each as soon as all that it follows from is there."""
        sharded = {id(tensor) for tensor in self._shards.tensors}
        waiting = {field.name: {id(t) for t in field.tensors} & sharded for field in self._fields(slot)}
        fields = {field.name: field for field in self._fields(slot)}
        values: dict[int, Any] = {}
        for bucket, flat in self._shards.gather_on_root(slot.of, f"state.{number}"):
            if keeper is None:
                continue
            values |= bucket.by_tensor(flat)
            for name in [name for name, needed in waiting.items() if needed <= values.keys()]:
                del waiting[name]
                keeper.keep_all(self._arrays(fields[name], values))
            still = set().union(*waiting.values())
            values = {key: value for key, value in values.items() if key in still}

    def _scatter(self, slot: ShardedSlot, state: PortableState) -> None:
        """Collective. Give every worker its part of a slot of rank 0's state."""
        fields = list(self._fields(slot))

        def fill(bucket: Any, flat: Any) -> None:
            values = bucket.by_tensor(flat)
            for field in fields:
                if any(id(tensor) in values for tensor in field.tensors):
                    self._fill(field, values, state)

        self._shards.scatter_from_root(fill, slot.of, f"slot.{slot.prefix}")

    def _scatter_counts(self, state: PortableState) -> None:
        """Collective. Give every worker the counts of steps of rank 0's state, if ``load`` does not."""
