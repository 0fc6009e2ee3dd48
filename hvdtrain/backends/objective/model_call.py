"""How a batch is given to a model: its ``inputs``, or columns by name; and the outputs that a task serves."""

import inspect
import keyword
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hvdtrain.data.feed import HostBatch
from hvdtrain.data.numeric import SEPARATOR, TARGETS, nesting
from hvdtrain.errors import TaskError

Batch = Mapping[str, Any]

# columns that belong to the loss: a model is given them only within ``inputs``
OF_LOSS = (*TARGETS, "weights")
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


Prepare = Callable[[Batch], Batch]
Call = Callable[[Any, Batch], Any]


class ModelCall:
    """Calls a model on batches with flat names, in a way that is decided once for the names of a batch."""

    def __init__(self, framework: str, needs_targets: str = "") -> None:
        self._framework = framework
        self._needs_targets = needs_targets
        self._known: dict[tuple[str, ...], tuple[Prepare | None, Call]] = {}

    def __call__(self, model: Any, batch: Batch) -> tuple[Any, Batch]:
        """Return the model's outputs, and the batch as the loss is given it: nested, with "targets"."""
        names = tuple(batch)
        known = self._known.get(names)
        prepare, call = known or (_preparation(batch), _call(self._framework, model, nested_batch(batch)))
        if prepare is not None:
            batch = prepare(batch)
        outputs = call(model, batch)
        if known is None:  # after the call, which is all that a prediction needs: its data may lack targets
            if self._needs_targets and isinstance(batch.get("targets", ()), Mapping | tuple):
                found = "several of them" if "targets" in batch else sorted(batch)
                raise TaskError(
                    f"{self._needs_targets} compares the model's outputs with one array, batch['targets']; "
                    f"the batch has {found}",
                    "Name the key, hvdtrain.as_dataset(data, targets=...), or write a function (outputs, "
                    "batch).",
                    everywhere=True,
                )
            self._known[names] = prepare, call
        return outputs, batch


def nested_batch(batch: Batch) -> Batch:
    """Return a batch with flat names nested; itself if nothing in it is nested."""
    nest = nesting(batch)
    return batch if nest is None else nest(batch)


def describe_columns(framework: str, model: Any, names: Iterable[str]) -> str:
    """Return which columns the model is given by name and which not; nothing if it is given ``inputs``."""
    batch = nested_batch(dict.fromkeys(names))
    if "inputs" in batch:
        return ""
    accepted = _Accepted.of(framework, model)
    taken = accepted.columns(batch)
    rest = [name for name in batch if name not in taken and name not in OF_LOSS]
    given = f"the model is given the columns {', '.join(taken)}"
    return f"{given}; it is not given {', '.join(rest)}" if rest and taken else ""


@dataclass(frozen=True)
class _Accepted:
    """What a model can be called with."""

    names: Sequence[str]  # what it accepts by name
    required: Sequence[str]  # those without a default
    positional: int  # how many of the required ones can be given by position
    any_name: bool = False  # whether it accepts any name (``**kwargs``)
    # whether it is a Keras model with symbolic inputs, which takes one mapping or list
    symbolic: bool = False

    @classmethod
    def of(cls, framework: str, model: Any) -> "_Accepted":
        structure, tensors = getattr(model, "input", None), getattr(model, "inputs", None)
        tensors = tensors if framework == "tf" and isinstance(tensors, list) else []
        if tensors and all(type(tensor).__name__ == "KerasTensor" for tensor in tensors):
            names = list(map(str, structure)) if isinstance(structure, Mapping) else [t.name for t in tensors]
            return cls(names, names, 1, symbolic=True)
        method = getattr(model, "call" if framework == "tf" else "forward", model)
        try:
            parameters = list(inspect.signature(method).parameters.values())
        except (TypeError, ValueError):
            return cls((), (), 1, any_name=True)
        if framework == "tf":  # the backend gives it
            parameters = [p for p in parameters if p.name != "training"]
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIABLE]
        positional = [p for p in required if p.kind is not p.KEYWORD_ONLY]
        any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return cls([p.name for p in by_name], [p.name for p in required], len(positional), any_name)

    def columns(self, batch: Iterable[str]) -> list[str]:
        """Return the names of a batch without "inputs" that the model is given."""
        own = [name for name in batch if name not in OF_LOSS]
        named = [name for name in own if name in self.names]
        return named if named or not self.any_name else own

    def takes(self, names: Iterable[str]) -> bool:
        """Return whether the model can be called with exactly these names."""
        given = set(names)
        return given >= set(self.required) and (self.any_name or given <= set(self.names))


def _preparation(names: Iterable[str]) -> Prepare | None:
    """Return the function that nests a batch and names its targets; None if it can stay as it is."""
    nest = nesting(names)
    tops = {name.partition("/")[0] for name in names}
    found = [name for name in TARGETS if name in tops]
    if "targets" in found or len(found) != 1:  # of labels and label, either can be the targets
        return nest
    key = found[0]

    def prepare(batch: Batch) -> Batch:
        nested = batch if nest is None else nest(batch)
        return {**nested, "targets": nested[key]}

    return prepare


def _call(framework: str, model: Any, batch: Batch) -> Call:
    """Return how the model is called with batches such as this one."""
    # exports set the phase, and watch the model
    model = inspect.unwrap(model.func if isinstance(model, partial) else model)
    accepted = _Accepted.of(framework, model)
    if "inputs" not in batch:
        return _call_by_columns(framework, accepted, batch)
    dropped = [name for name in batch if name in accepted.names and name != "inputs" and name not in OF_LOSS]
    if dropped:  # such as a mask
        raise TaskError(
            f"the model takes {dropped} by name and the batch has them; it is given batch['inputs'] alone",
            f"Put all of them into inputs, such as hvdtrain.as_dataset(data, inputs=[{dropped[0]!r}, ...]); "
            "name all columns as the model does, without 'inputs'; rename them; or write "
            f"{framework}_loss(model, batch).",
            everywhere=True,
        )
    inputs = batch["inputs"]
    if isinstance(inputs, Mapping):
        names, found = set(inputs), f"has {list(inputs)}"
        if not accepted.symbolic and accepted.takes(names):
            return lambda model, batch: model(**batch["inputs"])
        takes_one = accepted.positional == 1 and len(accepted.required) == 1
        if names == set(accepted.names) if accepted.symbolic else takes_one and not names & {*accepted.names}:
            return lambda model, batch: model(batch["inputs"])
    elif isinstance(inputs, tuple):
        found = f"is a tuple of {len(inputs)}"
        takes_mapping = isinstance(getattr(model, "input", None), Mapping)
        if not accepted.symbolic and not (framework == "tf" and accepted.positional <= 1):
            return lambda model, batch: model(*batch["inputs"])
        if not accepted.symbolic or (len(accepted.names) == len(inputs) and not takes_mapping):
            return lambda model, batch: model(list(batch["inputs"]))
    else:
        return lambda model, batch: model(batch["inputs"])
    raise TaskError(
        f"the model takes {list(accepted.names)}, of which {list(accepted.required)} must be given; "
        f"batch['inputs'] {found}",
        "Give inputs the model's names: the arguments of forward() or call(), or the names of keras.Input().",
        everywhere=True,
    )


def _call_by_columns(framework: str, accepted: _Accepted, batch: Batch) -> Call:
    names = accepted.columns(batch)
    if not names or not accepted.takes(names):
        raise TaskError(
            f"samples have no 'inputs' for the model; they have {sorted(batch)}, and the model takes "
            f"{list(accepted.names)}, of which {list(accepted.required)} must be given",
            "Name the key, hvdtrain.as_dataset(data, inputs=...), name the columns as the model does, or "
            f"give the task {framework}_loss.",
            everywhere=True,
        )
    if accepted.symbolic:
        return lambda model, batch: model({name: batch[name] for name in names})
    return lambda model, batch: model(**{name: batch[name] for name in names})


KeyPath = tuple[str | int, ...]


class Tensors(NamedTuple):
    """What is done with a framework's tensors."""

    is_tensor: Callable[[Any], bool]  # returns whether a value is one
    to_numpy: Callable[[Any], Any]  # returns one as an array
    batch_of: Callable[[HostBatch], Mapping[str, Any]]  # returns a batch as the task's functions take it
    serve: str  # the task's method that says what is served


class Served(UserDict[str, Any]):
    """A batch without labels, nested, that remembers what is read of it."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.read = dict[str, None]()
        super().__init__(nested_batch({name: batch[name] for name in batch if _top(name) not in TARGETS}))

    def __getitem__(self, name: str) -> Any:
        self.read[name] = None
        return super().__getitem__(name)

    def columns(self, batch: Mapping[str, Any]) -> list[str]:
        """Return the flat names of what has been read, in the order of reading."""
        return [name for top in self.read for name in batch if _top(name) == top]


def _top(name: str) -> str:
    return name.partition(SEPARATOR)[0]


class Serving:
    """What is served of a task's model: what its method for it returns, or the call for its ``loss``."""

    def __init__(self, task: Any, framework: str, objective: Callable[..., Any]) -> None:
        self._own, self._objective = getattr(task, f"{framework}_serve", None), objective
        self._call, self._framework = ModelCall(framework), framework
        is_called = hasattr(task, "loss") and not hasattr(task, f"{framework}_loss")
        self.is_model_call = self._own is None and is_called  # whether it is hvdtrain that calls the model

    def outputs(self, model: Any, batch: Mapping[str, Any]) -> Any:
        """Return what a model in evaluation gives for a batch without labels."""
        if self._own is not None:
            return self._own(model, batch)
        if self.is_model_call:
            return self._call(model, batch)[0]
        name = self._framework
        raise TaskError(
            f"the task's {name}_loss or {name}_step calls the model itself: what is served is not known",
            f'Give the task {name}_serve(model, batch), which returns it, such as model(batch["inputs"]).',
            everywhere=True,
        )

    def predicted(self, model: Any, batch: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
        """Return the outputs for a batch by name."""
        return tensors_of(self.outputs(model, Served(batch)), tensors)

    def arrays(self, model: Any, batch: HostBatch, tensors: Tensors) -> list[NDArray[Any]]:
        """Return the outputs for a batch, or what the task's own loss returns, to compare two models."""
        given = tensors.batch_of(batch)
        is_known = self.is_model_call or self._own is not None
        found = self.outputs(model, Served(given)) if is_known else self._objective(model, given)
        return [tensors.to_numpy(tensor) for tensor in named_outputs(found, tensors)[0].values()]


def leaves(tree: Any, is_leaf: Callable[[Any], bool], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the leaves of nested mappings, tuples and lists."""
    if is_leaf(tree) or not isinstance(tree, (Mapping, tuple, list)):
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(value, is_leaf, (*path, key if isinstance(key, int) else str(key)))


def named_outputs(
    outputs: Any, tensors: Tensors, taken: Sequence[str] = ()
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the tensors in a model's outputs by name, and what else there is, as text."""
    if is_dataclass(outputs) and not isinstance(outputs, (type, Mapping)):
        outputs = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    elif isinstance(outputs, tuple) and hasattr(outputs, "_asdict"):
        outputs = outputs._asdict()
    named: dict[str, Any] = {}
    ignored = []
    for path, leaf in leaves(outputs, tensors.is_tensor):
        if tensors.is_tensor(leaf):
            name = identifier(path if path and isinstance(path[0], str) else ("outputs", *path))
            while name in named or name in taken:
                name += "_output" if name in taken else "_"
            named[name] = leaf
        elif leaf is not None:
            ignored.append(f"{'.'.join(map(str, path))} (a {type(leaf).__name__})")
    return named, tuple(ignored)


def tensors_of(outputs: Any, tensors: Tensors, taken: Sequence[str] = ()) -> dict[str, Any]:
    """Return the tensors in a model's outputs by name; there must be some."""
    named, _ = named_outputs(outputs, tensors, taken)
    if not named:
        raise TaskError(
            f"the model returns no tensor, but a {type(outputs).__name__}",
            f"Give the task {tensors.serve}(model, batch), which returns the outputs to serve.",
        )
    return named


def identifier(path: KeyPath) -> str:
    """Return a name for a path that can be one of an argument."""
    name = re.sub(r"\W", "_", "_".join(map(str, path)), flags=re.ASCII)
    if not name.isidentifier():
        return f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name == "self" else name
