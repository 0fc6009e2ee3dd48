"""The state of a model that no optimizer updates, on several workers: combined, or equal.

Moving statistics of norms are averaged before the model is evaluated or saved. Of other state that
training changes, all workers take rank 0's, unless the task's ``state_reductions`` say otherwise. What
training does not change is left as it is, bit by bit, and ought to be equal on all workers.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import TaskError
from hvdtrain.storage.text import some
from hvdtrain.workers.agreement import Workers

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.float64]
_New = tuple[Callable[[NDArray[Any]], None], NDArray[Any]]  # what sets a tensor, and the values that it gets

REDUCTIONS = ("rank0", "mean", "max")
_EXAMPLE = 'Write it as state_reductions = {"*.queue": "rank0"}; the others are "mean" and "max".'
_KINDS = {"int": "integers", "bool": "booleans", "complex": "complex numbers"}
_UNFIT = {"mean": ("int", "bool", "complex"), "max": ("complex",)}  # kinds that a reduction cannot have
_SHOWN = 6  # names in a message


class StateTensor:
    """A tensor that no optimizer updates.

    ``default`` is how it is combined if the task does not say it: "mean" for a moving statistic of a norm,
    "max" for the count of its batches; empty for all others.
    """

    read: Callable[[], Bytes]  # copies its bytes to the host
    write: Callable[[Bytes], None]  # sets them
    numbers: Callable[[], Numbers]  # returns its values
    assign: Callable[[Numbers], None]  # sets them

    def __init__(self, name: str, default: str, held: Any) -> None:
        self.name, self.default, self.held = f"model/{name}", default, held
        dtype = str(held.dtype)
        self.kind = next((kind for kind in ("bool", "complex", "float") if kind in dtype), "int")

    def stamp(self) -> object:
        """Return another value once something has written to it; None where nothing shows that."""
        return None


_Tensors = Callable[[], Sequence[StateTensor]]


@dataclass
class Changes:
    """What a dry run changed other than the trained parameters, before it was put back."""

    # checksums of the state that has changed, by portable name
    crcs: dict[str, int] = field(default_factory=dict)
    refusal: TaskError | None = None  # what makes the model one that cannot be trained as it is


def made_late(names: Sequence[str], method: str, call: str) -> TaskError | None:
    """Return the error for parameters or state that a model makes when it is called, or None."""
    if not names:
        return None
    return TaskError(
        f"the model makes {_some(names)} only when it is called in a step: what is made after {method}() is "
        "neither trained nor saved",
        f"Make it in {method}(), or call the model there once, before it is returned: {call}.",
    )


class ReplicaState:
    """The workers' copies of a model's state that no optimizer updates.

    ``collectives`` joins their bytes and sums their numbers; ``tensors`` returns the tensors as they are now,
    in the same order on all workers; they are not ``is_whole`` in a stage.
    """

    def __init__(
        self, task: Any, workers: Any, collectives: Any, tensors: _Tensors, is_whole: bool = True
    ) -> None:
        self._workers, self._collectives, self._tensors = workers, collectives, tensors
        self._declared = _declared(task, tensors(), is_whole)
        self.changing: dict[str, bool] = {}  # the names of what training changes: whether workers then differ
        self._begun: dict[str, int] = {}  # checksums before the first step
        self._stamps: dict[str, object] = {}  # at that time
        self._late: list[str] = []  # found to change after the dry run

    def restart(self) -> None:
        """Take the values as those that all workers begin with. Local: no collective."""
        self._begun, self._stamps = {}, {}

    def follow(self, workers: Workers, root: int) -> None:
        """Collective. Take what the root knows to change; a worker that joins does not know it."""
        self.changing = dict(workers.broadcast_object(self.changing, root))

    def checksums(self) -> list[tuple[str, int]]:
        """Return name and checksum of each tensor that ought to be equal on all workers. Local."""
        tensors = self._tensors()
        found = self._checksums(tensors)
        ought = [t for t in tensors if not (self._reduction(t) or t.name in self.changing)]
        return [(tensor.name, found[tensor.name][0]) for tensor in ought]

    def expect(self, changed: Sequence[Mapping[str, int]]) -> None:
        """Take what a training step changed on each worker, in the order of ranks, with checksums. Local."""
        for name in dict.fromkeys(name for of_rank in changed for name in of_rank):
            differ = len({of_rank.get(name) for of_rank in changed}) > 1
            # a worker of an elastic job does the dry run alone
            self.changing[name] = differ or getattr(self._workers, "is_elastic", False)

    def explain(self, differing: Mapping[str, Collection[int]]) -> set[str]:
        """Return which tensors differ because training changes them though the dry run did not. Local."""
        found = {n for n, crcs in differing.items() if n in self._begun and self._begun[n] not in crcs}
        self._learn(sorted(found))
        return found

    def _learn(self, names: Sequence[str]) -> None:
        self._late += [name for name in names if name not in self.changing]
        self.changing |= dict.fromkeys(names, True)

    def combine(self, error: TaskError | None = None) -> list[str]:
        """Collective. Give all workers the same state; return names that the dry run did not see change."""
        if self._workers.size == 1:
            if error is not None:
                raise error
            return []
        tensors = [
            tensor
            for tensor in self._tensors()
            if self._reduction(tensor)
            or tensor.name in self.changing
            or (stamp := tensor.stamp()) is None
            or stamp != self._stamps.get(tensor.name)  # else it is as it was before the first step
        ]
        found = self._checksums(tensors)
        own = {name: (crc, crc != self._begun[name], size) for name, (crc, size) in found.items()}
        errors, gathered = zip(*self._workers.allgather_object((error, own)), strict=True)
        if error := next(filter(None, errors), None):
            raise _wrong(error.problem, error.remedy)
        chosen: dict[str, list[StateTensor]] = {kind: [] for kind in REDUCTIONS}
        for tensor in tensors:
            name = tensor.name
            if not all(name in of_rank for of_rank in gathered):
                continue
            crcs, have_moved, sizes = zip(*(of_rank[name] for of_rank in gathered), strict=True)
            if (rank := next((r for r, size in enumerate(sizes) if size != sizes[0]), 0)) > 0:
                raise _wrong(
                    f"{_some([name])} has {sizes[0]} bytes on rank 0 and {sizes[rank]} on rank {rank}: it "
                    "cannot be combined or saved",
                    "Give the buffer one size on all workers, or register it with persistent=False.",
                )
            if len(set(crcs)) == 1:
                continue
            reduction = self._reduction(tensor)
            if not reduction and all(have_moved):
                self._learn([name])
            if reduction := reduction or ("rank0" if name in self.changing else ""):
                chosen[reduction].append(tensor)
        # all of them, or none if a worker is lost meanwhile
        for assign, values in [one for kind in REDUCTIONS for one in self._combined(kind, chosen[kind])]:
            assign(values)
        late, self._late = self._late, []
        return late

    def describe(self) -> str:
        """Return how the workers' state that training changes is combined, for the plan; empty if none is."""
        if self._workers.size == 1:
            return ""
        own = [name for name in self.changing if name not in self._declared]
        parts = [f"{_some([n])}: {kind}" for n, kind in self._declared.items()]
        if several := [name for name in own if self.changing[name]]:
            parts.append(
                f"{_some(several)}: each worker has its own; rank 0's is saved, as DistributedDataParallel "
                "has it (see state_reductions)"
            )
        if alike := [name for name in own if not self.changing[name]]:
            parts.append(f"{_some(alike)}: changed by training, the same on all workers; rank 0's is saved")
        return "; ".join(parts)

    def _reduction(self, tensor: StateTensor) -> str:
        return self._declared.get(tensor.name, tensor.default)

    def _checksums(self, tensors: Sequence[StateTensor]) -> dict[str, tuple[int, int]]:
        """Return checksum and bytes of each tensor by name."""
        found = {}
        for tensor in tensors:
            data = tensor.read()
            found[tensor.name] = zlib.crc32(data.data), data.nbytes
            if tensor.name not in self._begun:  # also a parameter that was frozen meanwhile
                self._begun[tensor.name], self._stamps[tensor.name] = found[tensor.name][0], tensor.stamp()
        return found

    def _combined(self, reduction: str, tensors: Sequence[StateTensor]) -> Iterable[_New]:
        """Collective. Return what sets each tensor, and the values that it gets."""
        if not tensors:
            return ()
        setters: list[Callable[[Any], None]]
        setters = [tensor.write if reduction == "rank0" else tensor.assign for tensor in tensors]
        own: list[Any] = [tensor.read() if reduction == "rank0" else tensor.numbers() for tensor in tensors]
        joined = np.concatenate(own)
        if reduction == "rank0":
            sent = joined if self._workers.rank == 0 else joined[:0]
            new = self._collectives.join(sent, "hvdtrain.state")
        elif reduction == "mean":
            new = self._collectives.sum(joined) / self._workers.size
        else:
            found = self._collectives.join(joined.view(np.uint8), "hvdtrain.state")
            new = found.view(np.float64).reshape(self._workers.size, -1).max(0)
        return zip(setters, np.split(new, np.cumsum([len(part) for part in own])[:-1]), strict=True)


def _declared(task: Any, tensors: Sequence[StateTensor], is_whole: bool) -> dict[str, str]:
    """Return the reduction of each tensor for which the task gives one, by name."""
    given = getattr(task, "state_reductions", None) or {}
    if not isinstance(given, Mapping):
        raise _wrong(f"state_reductions must be a mapping of patterns to reductions, found {given!r}")
    declared: dict[str, str] = {}
    for pattern, reduction in given.items():
        if not isinstance(pattern, str) or reduction not in REDUCTIONS:
            raise _wrong(f"state_reductions has {pattern!r}: {reduction!r}")
        matched = [tensor for tensor in tensors if _matches(pattern, tensor.name)]
        if not matched and is_whole:
            known = [tensor.name for tensor in tensors]
            there = f"There are {_some(known)}." if known else "The model has none."
            raise _wrong(
                f"state_reductions: the pattern {pattern!r} matches no state other than the trained "
                "parameters",
                f"{there} * stands for any text.",
            )
        for tensor in matched:
            # the first pattern that matches counts
            counts = declared.setdefault(tensor.name, reduction) == reduction
            if counts and tensor.kind in _UNFIT.get(reduction, ()):
                raise _wrong(
                    f"state_reductions: {tensor.name} has {_KINDS[tensor.kind]}, of which there is no "
                    f"{reduction!r}",
                    'Choose "rank0", or give the model a buffer of floating-point numbers.',
                )
    return declared


def _matches(pattern: str, name: str) -> bool:
    pattern, name = pattern.replace(".", "/"), name.replace(".", "/")
    return fnmatchcase(name, pattern) or fnmatchcase(name.removeprefix("model/"), pattern)


def _wrong(problem: str, remedy: str = _EXAMPLE) -> TaskError:
    return TaskError(problem, remedy, everywhere=True)


def _some(names: Sequence[str]) -> str:
    return some((name.removeprefix("model/") for name in names), _SHOWN)
