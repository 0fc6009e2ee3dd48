"""The outputs that a task serves: which call of its model gives them, without labels, and their names."""

import keyword
import re
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hvdtrain.backends.objective.model_call import ModelCall, nested_batch
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.numeric import SEPARATOR, TARGETS
from hvdtrain.errors import TaskError

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
