"""The state of a split model as one portable state: gathered on rank 0, and given out again."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import wire
from hvdtrain.agreement import Workers, run_on_rank_zero
from hvdtrain.backends.base import PortableState, Shapes
from hvdtrain.backends.pipeline.layout import Layout
from hvdtrain.backends.pipeline.messages import Bytes, Messenger
from hvdtrain.backends.portable.names import check_state
from hvdtrain.backends.portable.spool import Spool
from hvdtrain.errors import TaskError

Arrays = Iterable[tuple[str, NDArray[Any]]]


class ReadyState:
    """A portable state that is gathered already.

    Args:
        state: the state; None if it could not be gathered.
        error: why not.
    """

    def __init__(self, state: PortableState | None, error: OSError | None = None) -> None:
        self._state = state
        self._error = error

    def read(self) -> PortableState:
        """Return the state; may be called once, in another thread.

        Raises:
            OSError: If there was no room to gather it.
        """
        if self._state is None:
            raise self._error or OSError("the state could not be gathered")
        state, self._state = self._state, None
        return state


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
        messenger.send_bytes(_length_of(None), 0)
        return None
    for rank in layout.ranks_of_replica()[1:]:
        while (found := _receive_head(messenger, rank)) is not None:
            name, dtype, shape = found
            try:
                array = spool.empty(shape, dtype)
            except OSError as lack:  # the others send what is left of theirs
                error, array = error or lack, np.empty(shape, dtype)
            messenger.receive_into(_bytes_of(array), rank)
            state.setdefault(name, array)
    return ReadyState(None if error else state, error)


def scatter_arrays(
    state: PortableState | None,
    expected: Shapes,
    more: Iterable[str],
    own_names: Mapping[str, str],
    *,
    framework: str,
    workers: Workers,
    messenger: Messenger,
) -> PortableState:
    """Collective. Check rank 0's whole state, and return this worker's part of it.

    Args:
        state: the state on rank 0; not looked at on other ranks.
        expected: the shapes of this worker's arrays, by portable name.
        more: names of arrays that this worker takes if the state has them.
        own_names: portable names to the model's own where ``state_names`` makes them differ.
        framework: "torch" or "tf".
        workers: the job's workers.
        messenger: what passes messages between workers.

    Raises:
        TaskError: On every worker, listing missing, unexpected and misshapen names.
    """
    wanted = workers.allgather_object((dict(expected), list(more), dict(own_names)))

    def check() -> None:
        shapes = {name: tuple(shape) for of_rank, *_ in wanted for name, shape in of_rank.items()}
        names = {name: own for *_, of_rank in wanted for name, own in of_rank.items()}
        check_state(shapes, state or {}, framework, names)

    run_on_rank_zero(workers, check)
    if workers.rank:
        part: PortableState = {}
        while (found := _receive_head(messenger, 0)) is not None:
            name, dtype, shape = found
            array = np.empty(shape, dtype)
            messenger.receive_into(_bytes_of(array), 0)
            part[name] = array
        return part
    assert state is not None
    for rank, (shapes, others, _) in enumerate(wanted[1:], 1):
        for name in (*shapes, *others):
            if name in state:
                _send(messenger, name, state[name], rank)
        messenger.send_bytes(_length_of(None), rank)
    names = {*wanted[0][0], *wanted[0][1]}
    return {name: array for name, array in state.items() if name in names}


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
    text = np.frombuffer(wire.encode((name, array.dtype.str, tuple(array.shape))), np.uint8)
    messenger.send_bytes(_length_of(text), to)
    messenger.send_bytes(text, to)
    messenger.send_bytes(_bytes_of(np.ascontiguousarray(array)), to)


def _receive_head(messenger: Messenger, source: int) -> tuple[str, str, tuple[int, ...]] | None:
    """Return name, type and shape of the next array; None if there is none."""
    length = np.empty(8, np.uint8)
    messenger.receive_into(length, source)
    if not (size := int(length.view(np.int64)[0])):
        return None
    text = np.empty(size, np.uint8)
    messenger.receive_into(text, source)
    name, dtype, shape = wire.decode(text.tobytes(), f"rank {source}")
    return name, dtype, shape


def _length_of(text: Bytes | None) -> Bytes:
    return np.array([0 if text is None else len(text)], np.int64).view(np.uint8)


def _bytes_of(array: NDArray[Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)
