"""Nested arguments and outputs of models; recorded calls of a model, and what of them a program's can be."""

import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hvdtrain.backends.objective.model_call import nested_batch
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.numeric import SEPARATOR, TARGETS
from hvdtrain.errors import TaskError

KeyPath = tuple[str | int, ...]


class Tensors(NamedTuple):
    """What is done with a framework's tensors."""

    is_tensor: Callable[[Any], bool]  # returns whether a value is one
    to_numpy: Callable[[Any], Any]  # returns one as an array


def named_outputs(
    outputs: Any, tensors: Tensors, taken: Sequence[str] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the tensors in a model's outputs by name, and what else there is, as text."""
    named: dict[str, Any] = {}
    ignored = []
    for path, leaf in leaves(_plain(outputs), tensors.is_tensor):
        keys = path if path and isinstance(path[0], str) else ("outputs", *path)
        if tensors.is_tensor(leaf):
            name = _identifier(keys)
            while name in named or name in taken:
                name += "_output" if name in taken else "_"
            named[name] = leaf
        elif leaf is not None:
            ignored.append(f"{'.'.join(map(str, path))} (a {type(leaf).__name__})")
    return named, tuple(ignored)


def leaves(tree: Any, is_leaf: Callable[[Any], bool], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the leaves of nested mappings, tuples and lists."""
    if is_leaf(tree) or not isinstance(tree, (Mapping, tuple, list)):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
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


def _plain(outputs: Any) -> Any:
    """Return a model's outputs with named fields as a mapping."""
    if isinstance(outputs, Mapping):
        return outputs
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return dict(zip(outputs._fields, outputs, strict=True))
    return outputs


def unique_names(paths: Sequence[KeyPath]) -> list[str]:
    """Return a name for each path: its last key, or all of it if that is no name or not the only one."""
    last = [str(path[-1]) if isinstance(path[-1], str) else _identifier(path) for path in paths]
    names: list[str] = []
    for path, key in zip(paths, last, strict=True):
        name = _identifier((key,)) if last.count(key) == 1 else _identifier(path)
        while name in names:
            name += "_"
        names.append(name)
    return names


def _identifier(path: KeyPath) -> str:
    name = re.sub(r"\W", "_", "_".join(map(str, path)), flags=re.ASCII)
    if not name.isidentifier():
        return f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name == "self" else name


def dotted(path: KeyPath) -> str:
    """Return a path for a message."""
    return repr(".".join(map(str, path)))


# what a program keeps of the arguments that are no tensors
_CONSTANTS = (type(None), bool, int, float, str)


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


def record_serving(
    serve: Callable[[Any, Mapping[str, Any]], Any], model: Any, batch: Mapping[str, Any], size: int
) -> Recording:
    """Return a task's own function for serving as a recorded call, with what it reads of a batch."""
    given = {name: value for name, value in batch.items() if name.partition(SEPARATOR)[0] not in TARGETS}
    read = _KeysRead(nested_batch(given))
    outputs = serve(model, read)
    return Recording(batch, size, [Call((read.values_read,), {}, outputs)])


def record_batches(record: Callable[[HostBatch], Recording], batches: Sequence[HostBatch]) -> list[Recording]:
    """Return what is recorded on each batch; other sizes than the first if the loss takes them."""
    recordings: list[Recording] = []
    for batch in batches:
        try:
            recordings.append(record(batch))
        except Exception:
            if batch.indices.shape == batches[0].indices.shape:
                raise
    return recordings


def outputs_of(
    recording: Recording,
    model: Callable[..., Any],
    signature: inspect.Signature,
    tensors: Tensors,
    remedy: str,
) -> dict[str, Any]:
    """Return the outputs of the only call of the model by name; without labels, if the loss gives it some."""
    call = _only_call(recording, remedy)
    outputs, bound = call.outputs, signature.bind(*call.args, **call.kwargs)
    sources = {id(leaf): path for path, leaf in leaves(recording.batch, tensors.is_tensor)}
    if _leave_out_labels(bound, signature, sources, tensors, remedy):
        outputs = model(*bound.args, **bound.kwargs)
    named, _ = named_outputs(outputs, tensors)
    if not named:
        raise TaskError(f"the model returns no tensor, but a {type(outputs).__name__}", remedy)
    return named


class _KeysRead(Mapping[str, Any]):
    """A batch that remembers what was read of it."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.values_read: dict[str, Any] = {}
        self._batch = batch

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
class Slot:
    """The place of a program's input in the arguments of a call."""

    name: str


@dataclass(frozen=True)
class ReadCall:
    """A recorded call of a model."""

    # arguments by the parameters of the model's forward method, with slots for tensors
    parameters: Mapping[str, Any]
    args: tuple[Any, ...]  # the positional arguments, likewise
    kwargs: Mapping[str, Any]  # the keyword arguments, likewise
    tensors: Mapping[str, Any]  # the tensors of the slots
    in_batch: frozenset[str]  # names of the slots whose tensors are in the batch as they are
    left_out: tuple[str, ...]  # the labels among the arguments


def read_call(recording: Recording, signature: inspect.Signature, tensors: Tensors, remedy: str) -> ReadCall:
    """Return the call that was recorded on one batch, with slots for its tensors and without labels."""
    call = _only_call(recording, remedy)
    bound = signature.bind(*call.args, **call.kwargs)
    sources = {id(leaf): path for path, leaf in leaves(recording.batch, tensors.is_tensor)}
    left_out = _leave_out_labels(bound, signature, sources, tensors, remedy)
    found: dict[int, tuple[KeyPath, Any]] = {}
    for path, leaf in _argument_leaves(bound, signature, tensors):
        if tensors.is_tensor(leaf):
            found.setdefault(id(leaf), (sources.get(id(leaf), path), leaf))
        elif not isinstance(leaf, _CONSTANTS):
            raise TaskError(
                f"the loss calls the model with {dotted(path)}, a {type(leaf).__name__}, "
                "which can be no input of a program",
                remedy,
            )
    if not found:
        raise TaskError("the loss calls the model without a tensor", remedy)
    names = dict(zip(found, unique_names([path for path, _ in found.values()]), strict=True))
    slots = {key: Slot(name) for key, name in names.items()}
    return ReadCall(
        parameters=_with_slots(dict(bound.arguments), slots, tensors.is_tensor),
        args=_with_slots(bound.args, slots, tensors.is_tensor),
        kwargs=_with_slots(dict(bound.kwargs), slots, tensors.is_tensor),
        tensors={name: found[key][1] for key, name in names.items()},
        in_batch=frozenset(name for key, name in names.items() if key in sources),
        left_out=left_out,
    )


def _only_call(recording: Recording, remedy: str) -> Call:
    """Return the only call that the loss makes."""
    calls, elsewhere = len(recording.calls), ", ".join(dict.fromkeys(recording.elsewhere))
    if calls != 1:
        used = f"; it uses its {elsewhere}" if elsewhere else ""
        times = "does not call the model" if calls == 0 else f"calls the model {calls} times for one batch"
        raise TaskError(f"the task's loss {times}{used}: it is not known what is to be computed", remedy)
    if elsewhere:
        raise TaskError(
            f"the task's loss calls the model, and uses its {elsewhere} besides: "
            "the model's call alone would lack that",
            remedy,
        )
    return recording.calls[0]


def _leave_out_labels(
    bound: inspect.BoundArguments,
    signature: inspect.Signature,
    sources: Mapping[int, KeyPath],
    tensors: Tensors,
    remedy: str,
) -> tuple[str, ...]:
    """Take the labels out of a call's arguments; return their names."""
    left_out = []
    for path, leaf in list(_argument_leaves(bound, signature, tensors)):
        source = sources.get(id(leaf), ())
        # of a flat name, such as "inputs/label"
        top = str(source[0]).partition(SEPARATOR)[0] if source else ""
        is_label = top in TARGETS or (path[-1] in TARGETS and top != "inputs")
        if not (is_label and tensors.is_tensor(leaf)):
            continue
        if not _remove(bound, signature, path):
            raise TaskError(
                f"the loss gives the model {dotted(source or path)}, which is not there when it is served, "
                f"and the model's {dotted(path)} has no default",
                remedy,
            )
        left_out.append(dotted(path))
    return tuple(left_out)


def _remove(bound: inspect.BoundArguments, signature: inspect.Signature, path: KeyPath) -> bool:
    """Take one argument out of a call; return whether that is possible."""
    name, *inner = path
    if name not in bound.arguments:  # one of **kwargs, under its own name
        name = next(p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD)
        inner = list(path)
    if not inner:
        if signature.parameters[str(name)].default is inspect.Parameter.empty:
            return False
        del bound.arguments[str(name)]
        return True
    bound.arguments[str(name)], is_removed = _without(bound.arguments[str(name)], inner)
    return is_removed


def _without(tree: Any, path: Sequence[str | int]) -> tuple[Any, bool]:
    """Return nested mappings without one entry, and whether it could be taken out of them."""
    key, *rest = path
    if not isinstance(tree, Mapping):
        return tree, False
    kept = dict(tree)
    found = kept.pop(key)
    if not rest:
        return kept, True
    changed, is_removed = _without(found, rest)
    return {**tree, key: changed}, is_removed


def check_equal(first: ReadCall, other: ReadCall, remedy: str) -> None:
    """Raise TaskError if two batches led to different calls."""
    if (first.parameters, first.left_out) == (other.parameters, other.left_out):
        return
    one, two = (dict(leaves(read.parameters, lambda leaf: isinstance(leaf, Slot))) for read in (first, other))
    differing = next((path for path in one | two if one.get(path, one) != two.get(path, two)), ("labels",))
    found = " and ".join(
        f"the tensor {leaf.name}" if isinstance(leaf, Slot) else repr(leaf)
        for leaf in (values.get(differing) for values in (one, two))
    )
    raise TaskError(
        f"the loss calls the model differently for different batches: {dotted(differing)} is {found}",
        remedy,
    )


def _argument_leaves(
    bound: inspect.BoundArguments, signature: inspect.Signature, tensors: Tensors
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the leaves of a call's arguments, by parameter; those of **kwargs by their own names."""
    for name, value in bound.arguments.items():
        start = () if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else (name,)
        yield from leaves(value, tensors.is_tensor, start)


def _with_slots(tree: Any, slots: Mapping[int, Slot], is_tensor: Callable[[Any], bool]) -> Any:
    return mapped(tree, lambda leaf: slots.get(id(leaf), leaf) if is_tensor(leaf) else leaf, is_tensor)


def filled(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Return arguments with tensors in their slots."""
    return mapped(
        tree,
        lambda leaf: tensors[leaf.name] if isinstance(leaf, Slot) else leaf,
        lambda leaf: isinstance(leaf, Slot),
    )
