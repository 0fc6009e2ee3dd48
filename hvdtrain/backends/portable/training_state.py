"""What the states of whole jobs of both frameworks share: the model's part of a portable state."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.base import PendingState
from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.portable.initial_values import has_ema, initial_value
from hvdtrain.backends.portable.names import check_state, check_unique
from hvdtrain.backends.records import PortableState, Shapes, StateArrays
from hvdtrain.backends.workers import peer_errors
from hvdtrain.errors import TaskError

_ALIGNED_BYTES = 64


class Keeper:
    """A portable state, whose arrays are taken in to the last one, though the disk be full.

    They lie in one temporary file of a folder, whose name is removed at once; in memory if it is None. The
    file takes room until the last of its arrays is gone, also if the process is killed.
    """

    def __init__(self, folder: Path | None) -> None:
        self.error: Exception | None = None
        self.state: PortableState = {}
        self._file, self._size = None, 0
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=folder, prefix=".spool-")  # noqa: SIM115 - lives as long as this
        except OSError as error:
            self.error = error

    def keep_all(self, arrays: Iterable[tuple[str, NDArray[Any]]]) -> None:
        """Take in arrays; of those of one name, the first."""
        try:
            for name, array in arrays:
                if self.error is None and name not in self.state:
                    self.state[name] = self._copied(array)
        except Exception as error:  # such as no room on the disk: the others are in the next collective
            self.error = self.error or error

    def read(self) -> PortableState:
        """Return the state, or raise what went wrong; may be called once, in another thread."""
        if self.error is not None:
            raise self.error
        state, self.state = self.state, {}
        return state

    def _copied(self, array: NDArray[Any]) -> NDArray[Any]:
        if self._file is None or not array.nbytes:
            return np.array(array)
        begin = self._size
        os.posix_fallocate(self._file.fileno(), begin, array.nbytes)
        self._size = -(-(begin + array.nbytes) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        copy = np.memmap(self._file, array.dtype, "r+", begin, array.shape)
        copy[...] = array
        return copy


class CommonOptimizerState:
    """One optimizer as portable state; its slots are fields, and it has numbers that are none."""

    starts_empty = False  # whether it makes its slots in its first step, as PyTorch's of tasks do
    slot_fields: Callable[[], Iterable[Any]]
    values: Callable[[], PortableState]  # the numbers
    write_numbers: Callable[[StateArrays], None]  # sets what ``values`` returns
    number_names: Callable[[], list[str]]  # those of the numbers that every state has
    make_slots: Callable[[StateArrays], None]  # those that a state has
    clear: Callable[[], None]  # drops everything that the optimizer keeps

    def __init__(self, model: Any, optimizer: Any, prefix: str) -> None:
        self._model, self.optimizer = model, optimizer
        self.prefix = f"optimizer/{prefix}"  # of the portable names of all that it keeps
        self._step = f"{self.prefix}step"

    def check(self) -> None:
        """Check that everything the optimizer keeps can be saved."""

    def has_slots(self) -> bool:
        """Return whether the optimizer keeps anything yet."""
        return True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the slots and of the numbers, by portable name."""
        slots = {field.name: field.shape for field in self.slot_fields()}
        return slots | dict.fromkeys(self.number_names(), ())


class CommonState:
    """Model and optimizers as portable state, as far as no framework has a part in it."""

    framework: ClassVar[str]
    kinds: ClassVar[tuple[Any, Any, Any]]  # classes of an optimizer's state, a snapshot, a moving average

    def __init__(self, model: Any, optimizers: Any, ema: Any = None, local: Any = None) -> None:
        of_optimizer, self._snapshot, average = self.kinds
        self.model, self.ema = model, ema or average(model, None)
        self._local = local  # the local steps; None if there are none
        by_name = optimizers if isinstance(optimizers, Mapping) else {MAIN: optimizers}
        prefixes = {MAIN: ""} if list(by_name) == [MAIN] else {name: f"{name}/" for name in by_name}
        self._parts = [of_optimizer(model, one, prefixes[name]) for name, one in by_name.items()]
        check_unique((field.name, field.own) for field in self._slots)

    def check(self) -> None:
        """Check that everything the optimizers keep can be saved."""
        for part in self._parts:
            part.check()

    def snapshot(self, kept: PortableState | None = None) -> PendingState:
        """Copy everything off the device, with what reducers and layers keep."""
        self.check()
        state: PortableState = dict(kept or {})
        for part in self._parts:
            state |= part.values()
        check_unique((field.name, field.own) for field in self._slots)
        fields = [*self.model.fields, *self.ema.fields, *self._outer_fields, *self._slots]
        pending: PendingState = self._snapshot(fields, state)
        return pending

    def load(self, state: StateArrays) -> None:
        """Load portable state, having checked all of it."""
        ema_fields = self.ema.fields if has_ema(state) else []
        has_outer = any(field.name in state for field in self._outer_fields)
        others = [*ema_fields, *(self._outer_fields if has_outer else ())]
        starting = [part for part in self._parts if part.starts_empty]
        emptied = [part for part in starting if not any(name.startswith(part.prefix) for name in state)]
        filled = [part for part in self._parts if part not in emptied]
        made = [part for part in starting if part in filled and not part.has_slots()]
        try:
            for part in made:
                part.make_slots(state)
            shapes = {field.name: field.shape for field in [*self.model.fields, *others]}
            for part in filled:
                shapes |= part.shapes()
            self.check_fits(shapes, state)
        except TaskError:
            for part in made:
                part.clear()
            raise
        for part in emptied:
            part.clear()
        for field in [*self.model.fields, *self._slots, *others]:
            field.write(state)
        if not ema_fields:
            self.ema.restart()
        if self._local is not None and not has_outer:
            self._local.restart()
        for part in self._parts:
            part.write_numbers(state)

    def shapes(self, with_ema: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all arrays, by portable name, if no optimizer starts empty."""
        fields = [*self.model.fields, *(self.ema.fields if with_ema else ())]
        found = {field.name: field.shape for field in fields}
        for part in self._parts:
            found |= part.shapes()
        return found

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield all arrays with their portable names, private ones too; some share memory with tensors."""
        self.check()
        for part in self._parts:
            yield from part.values().items()
        for field in [*self.model.fields, *self.ema.fields, *self._slots]:
            yield from field.arrays(field.tensors)

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
            if (value := initial_value(field.name, field.shape, seed)) is not None:
                field.write({field.name: value})
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
    def _slots(self) -> list[Any]:
        return [field for part in self._parts for field in part.slot_fields()]

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
            return keeper if is_root else None
        with peer_errors():
            for number, slot in enumerate(self._sharded):
                self._gather_slot(number, slot, keeper if is_root else None)
            counts = self._gather_counts()
        if not is_root:
            return None
        for field in self.model.fields:
            keeper.keep_all(self._arrays(field, {}))
        keeper.state |= {**kept, **counts}
        return keeper

    def _gather_slot(self, number: int, slot: ShardedSlot, keeper: "Keeper | None") -> None:
        """Collective. Keep a slot's arrays on rank 0, each as soon as all that it follows from is there."""
        sharded = {id(tensor) for tensor in self._shards.tensors}
        waiting = [(field, {id(t) for t in field.tensors} & sharded) for field in self._fields(slot)]
        values: dict[int, Any] = {}
        for bucket, flat in self._shards.gather_on_root(slot.of, f"state.{number}"):
            if keeper is None:
                continue
            values |= bucket.by_tensor(flat)
            for field, needed in waiting:
                if needed <= values.keys():
                    keeper.keep_all(self._arrays(field, values))
            waiting = [one for one in waiting if not one[1] <= values.keys()]
            still = set().union(*(needed for _, needed in waiting))
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
