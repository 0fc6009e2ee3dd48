"""The state of a split model as one portable state: gathered on rank 0, and given out again."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.base import PendingState
from hvdtrain.backends.pipeline.groups import Layout, StageGroups
from hvdtrain.backends.pipeline.messages import Bytes, Messenger
from hvdtrain.backends.portable.initial_values import has_ema
from hvdtrain.backends.portable.names import check_state
from hvdtrain.backends.portable.training_state import CommonState, ReadyState, Spool
from hvdtrain.backends.records import PortableState, Shapes, StateArrays
from hvdtrain.errors import TaskError
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers, run_on_rank_zero

Arrays = Iterable[tuple[str, NDArray[Any]]]


def gather_arrays(
    arrays: Arrays, layout: Layout, workers: Workers, messenger: Messenger, spool: Spool
) -> ReadyState | None:
    """Collective. Gather the arrays of all stages on rank 0, one array after the other.

    Args:
        arrays: this worker's, by portable name; those of other replicas than the first are not taken.
        layout: the place of this worker.
        workers: the job's workers.
        messenger: what passes messages between workers.
        spool: makes the arrays of rank 0.

    Returns:
        The state on rank 0, None on other ranks. What several stages have, such as tied weights, is that of
        the first of them.
    """
    state: PortableState = {}
    error: OSError | None = None
    if layout.rank == 0:
        try:
            state = {name: spool.keep(array) for name, array in arrays}
        except OSError as lack:  # such as no room on the disk
            error = lack
    if not workers.broadcast_object(error is None):
        return ReadyState(None, error) if layout.rank == 0 else None
    if layout.replica:
        return None
    if layout.rank:
        for name, array in arrays:
            _send(messenger, name, array)
        _send_end(messenger, 0)
        return None
    for rank in layout.ranks_of_replica()[1:]:
        while (found := _receive_words(messenger, rank)) is not None:
            name, dtype, shape = found
            try:
                array = spool.empty(shape, dtype)
            except OSError as lack:  # the others send what is left of theirs
                error, array = error or lack, np.empty(shape, dtype)
            messenger.receive_into(_bytes_of(array), rank)
            state.setdefault(name, array)
    return ReadyState(None if error else state, error)


class AskedState(Mapping[str, NDArray[Any]]):
    """A part of rank 0's state, which another worker gets array by array when it requests one.

    So it needs memory for one array in addition to what it loads them into.

    Args:
        names: the portable names of the part.
        messenger: what passes messages between workers.
    """

    def __init__(self, names: Iterable[str], messenger: Messenger) -> None:
        self._names = dict.fromkeys(names)
        self._messenger = messenger

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        _send_words(self._messenger, name, 0)
        _, dtype, shape = _receive_words(self._messenger, 0)
        array = np.empty(shape, dtype)
        self._messenger.receive_into(_bytes_of(array), 0)
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def end(self) -> None:
        """Let rank 0 know that this worker requests nothing more."""
        _send_end(self._messenger, 0)


def scatter_arrays(
    state: PortableState | None,
    expected: Shapes,
    more: Iterable[str],
    own_names: Mapping[str, str],
    *,
    load: Callable[[StateArrays], None],
    is_part: bool,
    framework: str,
    workers: Workers,
    messenger: Messenger,
) -> None:
    """Collective. Check rank 0's whole state, and let every worker load its part of it.

    Args:
        state: the state on rank 0; not looked at on other ranks.
        expected: the shapes of this worker's arrays, by portable name.
        more: names of arrays that this worker takes if the state has them.
        own_names: portable names to the model's own where ``state_names`` makes them differ.
        load: loads this worker's part.
        is_part: whether ``expected`` are as ``more``: arrays that the state may have.
        framework: "torch" or "tf".
        workers: the job's workers.
        messenger: what passes messages between workers.

    Raises:
        TaskError: On every worker, listing missing, unexpected and misshapen names.
    """
    of_ranks = workers.allgather_object((dict(expected), list(more), dict(own_names)))

    def check() -> list[str]:
        found = state or {}
        shapes = {name: tuple(shape) for wanted, *_ in of_ranks for name, shape in wanted.items()}
        if is_part:
            shapes = {name: shape for name, shape in shapes.items() if name in found}
        names = {name: own for *_, owns in of_ranks for name, own in owns.items()}
        check_state(shapes, found, framework, names)
        return list(found)

    there = set(run_on_rank_zero(workers, check))
    names = [name for name in (*expected, *more) if name in there]
    if workers.rank:
        part = AskedState(names, messenger)
        try:
            load(part)
        finally:
            part.end()
        return
    assert state is not None
    for rank in range(1, workers.size):
        while (name := _receive_words(messenger, rank)) is not None:
            _send(messenger, name, state[name], rank)
    load({name: state[name] for name in names})


def check_one_owner(owners: Mapping[str, list[int]]) -> None:
    """Check that what changes without a gradient, such as the statistics of batch norm, is in one stage.

    Args:
        owners: the stages of each such tensor, by its name.

    Raises:
        TaskError: naming one that several stages have.
    """
    for name, stages in owners.items():
        if len(stages) > 1:
            raise TaskError(
                f"{name} is in blocks of the stages {', '.join(str(stage + 1) for stage in stages)}, each of "
                "which would move it on its own",
                "Use the layer in one block only, or in blocks of one stage (stage_cuts).",
                everywhere=True,
            )


def _send(messenger: Messenger, name: str, array: NDArray[Any], to: int = 0) -> None:
    _send_words(messenger, (name, array.dtype.str, tuple(array.shape)), to)
    messenger.send_bytes(_bytes_of(np.ascontiguousarray(array)), to)


def _send_words(messenger: Messenger, words: Any, to: int) -> None:
    """Send something that travels: a name, or name, type and shape of the array that follows."""
    text = np.frombuffer(wire.encode(words), np.uint8)
    messenger.send_bytes(_length_of(text), to)
    messenger.send_bytes(text, to)


def _send_end(messenger: Messenger, to: int) -> None:
    messenger.send_bytes(_length_of(None), to)


def _receive_words(messenger: Messenger, source: int) -> Any:
    """Return what ``_send_words`` has sent; None at the end."""
    length = np.empty(8, np.uint8)
    messenger.receive_into(length, source)
    if not (size := int(length.view(np.int64)[0])):
        return None
    text = np.empty(size, np.uint8)
    messenger.receive_into(text, source)
    return wire.decode(text.tobytes(), f"rank {source}")


def _length_of(text: Bytes | None) -> Bytes:
    return np.array([0 if text is None else len(text)], np.int64).view(np.uint8)


def _bytes_of(array: NDArray[Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)


class StateOfStage(CommonState):
    """Model and optimizer of one stage as a part of a portable state; it stands before ``TrainingState``.

    Args:
        layout: the place of this worker.
        workers: the job's workers.
        messenger: what passes messages between them.
        groups: the workers that have what this one has.
        owners: the stages that have a tensor, by its path.
        *arguments: those of ``TrainingState``.
    """

    def __init__(
        self,
        layout: Layout,
        workers: Workers,
        messenger: Messenger,
        groups: StageGroups,
        owners: dict[str, list[int]],
        *arguments: Any,
    ) -> None:
        super().__init__(*arguments)
        self._layout = layout
        self._workers = workers
        self._messenger = messenger
        self._groups = groups
        self._owners = owners

    def gather(self, kept: PortableState, folder: Path | None, is_root: bool) -> PendingState | None:
        """Collective. Copy the state of all stages to rank 0, one array after the other.

        Args:
            kept: what else belongs to the state, as arrays: nothing with stages.
            folder: where the copy lies; in memory if None.
            is_root: whether this is rank 0.
        """
        spool = Spool(folder if is_root else None)
        return gather_arrays(self.arrays(), self._layout, self._workers, self._messenger, spool)

    def scatter(self, state: PortableState | None) -> None:
        """Collective. Check rank 0's whole state, and load this worker's part of it.

        Raises:
            TaskError: On every worker, if it does not fit.
        """
        with_ema = self._workers.broadcast_object(has_ema(state or {}))
        self._scatter(state, self.shapes(with_ema), self.load)

    def scatter_weights(self, weights: PortableState | None, is_part: bool) -> None:
        """Collective. Check rank 0's weights, which may be a part, and load this worker's part of them.

        Raises:
            TaskError: On every worker, if they do not fit.
        """
        shapes = self.weight_shapes()
        self._scatter(weights, shapes, lambda found: self.load_weights(found, is_part), is_part)

    def _scatter(
        self,
        state: PortableState | None,
        shapes: Shapes,
        load: Callable[[StateArrays], None],
        is_part: bool = False,
    ) -> None:
        scatter_arrays(
            state,
            shapes,
            self.private_names(),
            self.own_names(),
            load=load,
            is_part=is_part,
            framework=self.framework,
            workers=self._workers,
            messenger=self._messenger,
        )

    def check_fits(self, shapes: Shapes, state: StateArrays) -> None:
        """Do nothing: rank 0 has checked the whole state."""
