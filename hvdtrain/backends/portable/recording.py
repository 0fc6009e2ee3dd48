"""Recorded calls of a model: their arguments without labels, and their outputs by name."""

import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hvdtrain.backends.objective.model_call import nested_batch
from hvdtrain.backends.objective.objective import Objective
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.numeric import SEPARATOR, TARGETS
from hvdtrain.errors import TaskError

KeyPath = tuple[str | int, ...]


class Tensors(NamedTuple):
    """What is done with a framework's tensors."""

    is_tensor: Callable[[Any], bool]  # returns whether a value is one
    to_numpy: Callable[[Any], Any]  # returns one as an array


def leaves(tree: Any, is_leaf: Callable[[Any], bool], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the leaves of nested mappings, tuples and lists."""
    if is_leaf(tree) or not isinstance(tree, (Mapping, tuple, list)):
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(value, is_leaf, (*path, key if isinstance(key, int) else str(key)))


def mapped(tree: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    """Return nested mappings, tuples and lists with changed leaves; mappings become dicts."""
    if is_leaf(tree) or not isinstance(tree, (Mapping, tuple, list)):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(value, change, is_leaf) for key, value in tree.items()}
    values = [mapped(value, change, is_leaf) for value in tree]
    if hasattr(tree, "_fields"):
        return type(tree)(*values)
    return tuple(values) if isinstance(tree, tuple) else values


def named_outputs(
    outputs: Any, tensors: Tensors, taken: Sequence[str] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the tensors in a model's outputs by name, and what else there is, as text."""
    if is_dataclass(outputs) and not isinstance(outputs, (type, Mapping)):
        outputs = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    elif isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        outputs = dict(zip(outputs._fields, outputs, strict=True))
    named: dict[str, Any] = {}
    ignored = []
    for path, leaf in leaves(outputs, tensors.is_tensor):
        if tensors.is_tensor(leaf):
            name = _identifier(path if path and isinstance(path[0], str) else ("outputs", *path))
            while name in named or name in taken:
                name += "_output" if name in taken else "_"
            named[name] = leaf
        elif leaf is not None:
            ignored.append(f"{'.'.join(map(str, path))} (a {type(leaf).__name__})")
    return named, tuple(ignored)


def tensors_of(outputs: Any, tensors: Tensors, remedy: str, taken: Sequence[str] = ()) -> dict[str, Any]:
    """Return the tensors in a model's outputs by name; there must be some."""
    named, _ = named_outputs(outputs, tensors, taken)
    if not named:
        raise TaskError(f"the model returns no tensor, but a {type(outputs).__name__}", remedy)
    return named


def _identifier(path: KeyPath) -> str:
    """Return a name for a path that can be one of an argument."""
    name = re.sub(r"\W", "_", "_".join(map(str, path)), flags=re.ASCII)
    if not name.isidentifier():
        return f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name == "self" else name


def dotted(path: KeyPath) -> str:
    """Return a path for a message."""
    return repr(".".join(map(str, path)))


class ModelCalledError(Exception):
    """Ends a loss after its call of the model: what it does with the outputs is not wanted."""


class Call(NamedTuple):
    """A call of a model: its arguments and what it returned."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Any


@dataclass(frozen=True)
class Recording:
    """What was recorded while a loss computed one batch."""

    batch: Mapping[str, Any]  # the batch, as the loss received it
    size: int  # number of samples
    calls: Sequence[Call]  # the calls of the model
    elsewhere: Sequence[str] = ()  # parts of the model that were used without calling the model
    result: Any = None  # what the loss returned

    def arrays(self, tensors: Tensors) -> list[NDArray[Any]]:
        """Return the outputs of the model's calls, and what the loss returned, as arrays."""
        values = [*(call.outputs for call in self.calls), self.result]
        return [tensors.to_numpy(t) for value in values for t in named_outputs(value, tensors)[0].values()]

    def sources(self, tensors: Tensors) -> dict[int, KeyPath]:
        """Return where the batch's tensors are in it, by their identities."""
        return {id(leaf): path for path, leaf in leaves(self.batch, tensors.is_tensor)}

    def only_call(self, remedy: str) -> Call:
        """Return the only call that the loss makes."""
        count, used = len(self.calls), ", ".join(dict.fromkeys(self.elsewhere))
        if count == 1 and not used:
            return self.calls[0]
        found = {0: "does not call the model", 1: "calls the model"}.get(
            count, f"calls the model {count} times for one batch"
        )
        if used:
            found += f", and uses its {used} besides" if count else f"; it uses its {used}"
        raise TaskError(f"the task's loss {found}: it is not known what is to be computed", remedy)


class _KeysRead(Mapping[str, Any]):
    """A batch without labels that remembers what was read of it."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        given = {name: value for name, value in batch.items() if name.partition(SEPARATOR)[0] not in TARGETS}
        self.values_read: dict[str, Any] = {}
        self._batch = nested_batch(given)

    def __getitem__(self, name: str) -> Any:
        value = self.values_read[name] = self._batch[name]
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._batch

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call by parameter, those of ``**kwargs`` by their own names, without labels."""

    values: Mapping[str, Any]
    signature: inspect.Signature
    left_out: tuple[str, ...]  # the labels that the call had

    @classmethod
    def of(
        cls, recording: Recording, signature: inspect.Signature, tensors: Tensors, remedy: str
    ) -> "Arguments":
        """Return those of the only call that a loss makes."""
        call, sources = recording.only_call(remedy), recording.sources(tensors)
        values: dict[str, Any] = {}
        for name, value in signature.bind(*call.args, **call.kwargs).arguments.items():
            is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            values |= value if is_rest else {name: value}
        labels = {}
        for path, leaf in leaves(values, tensors.is_tensor):
            source = sources.get(id(leaf), ())
            # of a flat name, such as "inputs/label"
            top = str(source[0]).partition(SEPARATOR)[0] if source else ""
            is_label = top in TARGETS or (path[-1] in TARGETS and top != "inputs")
            if is_label and tensors.is_tensor(leaf):
                labels[path] = source or path
        kept = _without(values, labels)
        needed = [name for name, one in signature.parameters.items() if one.default is one.empty]
        there = {path for path, _ in leaves(kept, tensors.is_tensor)}
        for path, source in labels.items():
            if path in there or (len(path) == 1 and path[0] in needed):
                raise TaskError(
                    f"the loss gives the model {dotted(source)}, which is not there when it is served, "
                    f"and the model's {dotted(path)} has no default",
                    remedy,
                )
        return cls(kept, signature, tuple(map(dotted, labels)))

    def call(self, model: Callable[..., Any], values: Mapping[str, Any] | None = None) -> Any:
        """Call a model with these arguments, or with others in their place."""
        values = self.values if values is None else values
        known, rest = {}, dict(values)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                known[name] = rest
            elif name in rest:
                known[name] = rest.pop(name)
        bound = inspect.BoundArguments(self.signature, known)
        return model(*bound.args, **bound.kwargs)


def _without(tree: Any, dropped: Mapping[KeyPath, Any], path: KeyPath = ()) -> Any:
    """Return nested mappings without what has one of these paths."""
    if not isinstance(tree, Mapping):
        return tree
    return {
        key: _without(value, dropped, (*path, key if isinstance(key, int) else str(key)))
        for key, value in tree.items()
        if (*path, str(key)) not in dropped
    }


# what a program keeps of the arguments that are no tensors
_CONSTANTS = (type(None), bool, int, float, str)


class Slot(NamedTuple):
    """The place of a program's input in the arguments of a call."""

    name: str


class ReadCall(NamedTuple):
    """A recorded call with slots for its tensors."""

    arguments: Arguments
    tensors: Mapping[str, Any]  # those of the slots
    in_batch: frozenset[str]  # names of the slots whose tensors are in the batch as they are


def read_call(recording: Recording, signature: inspect.Signature, tensors: Tensors, remedy: str) -> ReadCall:
    """Return the call that was recorded on one batch, with slots for its tensors."""
    arguments, sources = Arguments.of(recording, signature, tensors, remedy), recording.sources(tensors)
    found: dict[int, tuple[KeyPath, Any]] = {}
    for path, leaf in leaves(arguments.values, tensors.is_tensor):
        if tensors.is_tensor(leaf):
            found.setdefault(id(leaf), (sources.get(id(leaf), path), leaf))
        elif not isinstance(leaf, _CONSTANTS):
            kind = type(leaf).__name__
            raise TaskError(
                f"the loss calls the model with {dotted(path)}, a {kind}, which can be no input of a program",
                remedy,
            )
    if not found:
        raise TaskError("the loss calls the model without a tensor", remedy)
    names = dict(zip(found, _unique_names([path for path, _ in found.values()]), strict=True))
    is_tensor = tensors.is_tensor
    values = mapped(
        arguments.values, lambda leaf: Slot(names[id(leaf)]) if is_tensor(leaf) else leaf, is_tensor
    )
    return ReadCall(
        replace(arguments, values=values),
        {name: found[key][1] for key, name in names.items()},
        frozenset(name for key, name in names.items() if key in sources),
    )


def _unique_names(paths: Sequence[KeyPath]) -> list[str]:
    """Return a name for each path: its last key, or all of it if that is no name or not the only one."""
    last = [str(path[-1]) if isinstance(path[-1], str) else _identifier(path) for path in paths]
    names: list[str] = []
    for path, key in zip(paths, last, strict=True):
        name = _identifier((key,)) if last.count(key) == 1 else _identifier(path)
        while name in names:
            name += "_"
        names.append(name)
    return names


@dataclass(frozen=True)
class ModelCalls:
    """How a framework calls a model that is in evaluation, and records what a task's loss does with it."""

    tensors: Tensors  # functions of the framework
    method: str  # the model's method whose signature says how it is called
    in_evaluation: Callable[[Any], Any]  # returns what is called in place of the model
    # (model, calls, elsewhere, is_one_call) -> a context with what a loss is given for the model: it records
    # calls, and uses of parts outside of these; if there is one call, that raises ModelCalledError
    watched: Callable[[Any, list[Call], list[str], bool], AbstractContextManager[Any]]
    batch_of: Callable[[HostBatch], Mapping[str, Any]]  # returns a batch as the task's loss takes it
    remedy: str  # what to do if the call cannot be served

    def served(
        self, model: Any, serve: Callable[..., Any] | None
    ) -> tuple[Callable[..., Any], inspect.Signature]:
        """Return the model, or the task's function for serving it, and its signature."""
        called = self.in_evaluation(model)
        if serve is None:
            return called, inspect.signature(getattr(model, self.method))
        served = partial(serve, called)
        return served, inspect.signature(served)

    def recorded(
        self,
        model: Any,
        objective: Objective,
        batch: Mapping[str, Any],
        serve: Callable[..., Any] | None = None,
        is_one_call: bool = False,
    ) -> Recording:
        """Return what the task's loss, or its function for serving, does with the model on one batch."""
        size = int(next(leaf for _, leaf in leaves(batch, self.tensors.is_tensor)).shape[0])
        if serve is not None:
            read = _KeysRead(batch)
            outputs = serve(self.in_evaluation(model), read)
            return Recording(batch, size, [Call((read.values_read,), {}, outputs)])
        calls: list[Call] = []
        elsewhere: list[str] = []
        result = None
        with self.watched(model, calls, elsewhere, is_one_call) as called, suppress(ModelCalledError):
            result = objective(called, batch)
        return Recording(batch, size, calls, elsewhere, result)

    def predicted(
        self,
        model: Any,
        objective: Objective,
        batch: Mapping[str, Any],
        serve: Callable[..., Any] | None = None,
        is_one_call: bool = False,
    ) -> dict[str, Any]:
        """Return the outputs for one batch by name; without labels, if the loss gives the model some."""
        recording = self.recorded(model, objective, batch, serve, is_one_call)
        served, signature = self.served(model, serve)
        arguments = Arguments.of(recording, signature, self.tensors, self.remedy)
        outputs = arguments.call(served) if arguments.left_out else recording.calls[0].outputs
        return tensors_of(outputs, self.tensors, self.remedy)
