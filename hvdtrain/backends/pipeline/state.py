"""The state of a split model as one portable state: gathered on rank 0, and given out again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.base import PendingState
from hvdtrain.backends.pipeline.messages import Message, Messenger
from hvdtrain.backends.portable.initial_values import has_ema
from hvdtrain.backends.portable.names import check_state
from hvdtrain.backends.portable.training_state import CommonState, Keeper
from hvdtrain.backends.records import PortableState, Shapes, StateArrays, StatePart
from hvdtrain.backends.workers import group_of
from hvdtrain.workers.agreement import Workers, run_on_rank_zero

_END = Message(None, [])


class RequestedState(Mapping[str, NDArray[Any]]):
    """A part of rank 0's state, of which another worker has one array in memory, when it requests that."""

    def __init__(self, names: Iterable[str], messenger: Messenger) -> None:
        self._names = dict.fromkeys(names)
        self._messenger = messenger

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        self._messenger.send(Message(name, []), 0)
        return _array_of(self._messenger.receive(0))[1]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class StateOfStage(CommonState):
    """Model and optimizer of one stage as a part of a portable state; it stands before ``TrainingState``."""

    # returns all tensors that replicas have, with the path of the model's tensor that they belong to
    replicated: Any
    copy: Any  # collective in a group: copies a rank's tensors to the others

    def __init__(self, step: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._step, self._layout = step, step.layout
        self._workers: Workers = step.workers
        self._messenger: Messenger = step.messenger

    def gather(self, kept: PortableState, folder: Path | None, is_root: bool) -> PendingState | None:
        """Collective. Copy the state of all stages to rank 0, one array after the other.

        What several stages have, such as tied weights, is that of the first of them.
        """
        keeper = Keeper(folder if is_root else None)
        if not self._workers.broadcast_object(keeper.error is None):
            return keeper.ready() if is_root else None
        if not is_root:
            if self._layout.replica == 0:
                for name, array in self.arrays():
                    self._send_array(name, array, 0)
                self._messenger.send(_END, 0)
                self._messenger.flush()
            return None
        receive = self._messenger.receive
        messages = (iter(partial(receive, rank), _END) for rank in range(1, self._layout.stages))
        keeper.keep_all(chain(self.arrays(), map(_array_of, chain.from_iterable(messages))))
        return keeper.ready(kept)

    def scatter(self, state: PortableState | None, part: StatePart) -> None:
        """Collective. Check rank 0's whole state, or a part of it, and load this worker's part of that."""
        is_part, load = part is StatePart.SOME_WEIGHTS, self.load
        if part is StatePart.ALL:
            expected = self.shapes(self._workers.broadcast_object(has_ema(state or {})))
        else:
            expected, load = self.weight_shapes(), partial(self.load_weights, is_part=is_part)
        workers, messenger = self._workers, self._messenger
        private = self.private_names()  # which the state may have
        of_ranks = workers.allgather_object(dict(expected))

        def check() -> list[str]:
            found = state or {}
            shapes = {name: tuple(shape) for wanted in of_ranks for name, shape in wanted.items()}
            if is_part:
                shapes = {name: shape for name, shape in shapes.items() if name in found}
            check_state(shapes, found, self.framework)
            return list(found)

        there = set(run_on_rank_zero(workers, check))
        names = [name for name in (*expected, *private) if name in there]
        if workers.rank:
            try:
                load(RequestedState(names, messenger))
            finally:
                messenger.send(_END, 0)
                messenger.flush()
            return
        assert state is not None
        for rank in range(1, workers.size):
            while (name := messenger.receive(rank).description) is not None:
                self._send_array(name, state[name], rank)
        load({name: state[name] for name in names})

    def check_fits(self, shapes: Shapes, state: StateArrays) -> None:
        """Do nothing: rank 0 has checked the whole state."""

    def broadcast(self, others: Sequence[Any] = ()) -> None:
        """Collective. Copy what the first of those workers has that have the same to the others.

        ``others`` belong to no tensor of the model, such as counts of steps.
        """
        by_owners: dict[tuple[int, ...], list[Any]] = {(self._layout.stage,): list(others)}
        for path, tensor in self.replicated():
            having = tuple(self._step.owners.get(path, [self._layout.stage]))
            by_owners.setdefault(having, []).append(tensor)
        for having, tensors in sorted(by_owners.items(), key=lambda item: item[0]):
            if (group := self._step.groups[having]).size > 1:
                self.copy(tensors, group.first, group_of(group), f"stage.{'.'.join(map(str, having))}")

    def _send_array(self, name: str, array: NDArray[Any], to: int) -> None:
        """Send an array, and wait until it is sent: one at a time takes memory."""
        buffer = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._messenger.send(Message((name, array.dtype.str, list(array.shape)), [buffer]), to)
        self._messenger.flush()


def _array_of(message: Message) -> tuple[str, NDArray[Any]]:
    name, dtype, shape = message.description
    return name, message.buffers[0].view(dtype).reshape(shape)
