"""How a batch is given to a model: its ``inputs``, or the columns that the model takes by name.

A batch comes with flat names. It is nested here, and how the model is called is decided once for the
names of a batch.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hvdtrain.data.numeric import TARGETS, nesting
from hvdtrain.errors import TaskError

Batch = Mapping[str, Any]

# columns that belong to the loss: a model is given them only within ``inputs``
OF_LOSS = (*TARGETS, "weights")
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


Prepare = Callable[[Batch], Batch]
Call = Callable[[Any, Batch], Any]


class ModelCall:
    """Calls a model on batches with flat names."""

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
            if self._needs_targets:
                _check_targets(self._needs_targets, batch)
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
        if framework == "tf" and (symbolic := _symbolic_names(model)):
            return cls(symbolic, symbolic, 1, symbolic=True)
        method = getattr(model, "call" if framework == "tf" else "forward", model)
        try:
            parameters = list(inspect.signature(method).parameters.values())
        except (TypeError, ValueError):
            return cls((), (), 1, any_name=True)
        if framework == "tf":  # the backend gives it
            parameters = [p for p in parameters if p.name != "training"]
        by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIABLE]
        return cls(
            [p.name for p in by_name],
            [p.name for p in required],
            len([p for p in required if p.kind is not p.KEYWORD_ONLY]),
            any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def columns(self, batch: Iterable[str]) -> list[str]:
        """Return the names of a batch without "inputs" that the model is given."""
        own = [name for name in batch if name not in OF_LOSS]
        named = [name for name in own if name in self.names]
        return named if named or not self.any_name else own

    def takes(self, names: Iterable[str]) -> bool:
        """Return whether the model can be called with exactly these names."""
        given = set(names)
        return given >= set(self.required) and (self.any_name or given <= set(self.names))


def _symbolic_names(model: Any) -> list[str]:
    """Return the names of the inputs of a functional or sequential Keras model; none of another."""
    structure, tensors = getattr(model, "input", None), getattr(model, "inputs", None)
    if not isinstance(tensors, list) or any(type(tensor).__name__ != "KerasTensor" for tensor in tensors):
        return []
    return [str(n) for n in structure] if isinstance(structure, Mapping) else [t.name for t in tensors]


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


def _check_targets(name: str, batch: Batch) -> None:
    """Check that a batch has targets that a named loss or metric can compare with."""
    if "targets" not in batch or isinstance(batch["targets"], (Mapping, tuple)):
        found = "several of them" if "targets" in batch else sorted(batch)
        raise TaskError(
            f"{name} compares the model's outputs with one array, batch['targets']; the batch has {found}",
            "Name the key, hvdtrain.as_dataset(data, targets=...), or write a function (outputs, batch).",
            everywhere=True,
        )
