"""What an exported program computes: the call that a task's loss makes of its model, as it was recorded.

A backend records what the loss does on a few batches of real samples. Here the recorded calls become one
program with named inputs, and every difference between them that a program could not have is refused.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.backends.portable.files import LARGEST_DIFFERENCE, compare
from hvdtrain.backends.portable.recording import (
    ReadCall,
    Recording,
    Slot,
    Tensors,
    check_equal,
    filled,
    leaves,
    named_outputs,
    read_call,
)
from hvdtrain.errors import TaskError

BATCH, LENGTH = "batch", "length"  # names of dynamic axes


@dataclass(frozen=True)
class ProgramInput:
    """An input of a program."""

    name: str  # its name
    dtype: str  # type of its elements
    shape: tuple[int, ...]  # its shape in the first batch
    # for each axis, the name of what it can be, "batch" or "length"; empty for a fixed one
    axes: tuple[str, ...]
    is_computed: bool  # whether the loss computes it, so that it is in no batch

    def with_axes(self, names: Sequence[str]) -> "ProgramInput":
        """Return the input with other axes."""
        return ProgramInput(self.name, self.dtype, self.shape, tuple(names), self.is_computed)


@dataclass(frozen=True)
class Case:
    """Inputs of a program that a real batch gave, and the outputs that the model gave for them."""

    size: int  # number of samples
    tensors: Mapping[str, Any]  # the inputs by name
    outputs: Mapping[str, Any]  # the outputs by name


@dataclass(frozen=True)
class Program:
    """A call of the model with named inputs."""

    args: tuple[Any, ...]  # positional arguments, with slots for the inputs
    kwargs: Mapping[str, Any]  # keyword arguments, likewise
    inputs: tuple[ProgramInput, ...]  # the inputs
    cases: tuple[Case, ...]  # real inputs with their outputs; the first is that of the largest batch
    left_out: tuple[str, ...] = ()  # arguments of training's call that the program's lacks: the labels
    ignored: tuple[str, ...] = ()  # what the model returns in addition to tensors, as text

    @property
    def is_plain(self) -> bool:
        """Whether the model is called with one tensor and nothing else."""
        return not self.kwargs and len(self.args) == 1 and isinstance(self.args[0], Slot)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the model's order."""
        return tuple(self.cases[0].outputs)

    def __call__(self, model: Callable[..., Any], tensors: Mapping[str, Any]) -> Any:
        """Call the model with these inputs; return its outputs as they are."""
        return model(*filled(self.args, tensors), **filled(dict(self.kwargs), tensors))

    def named(self, outputs: Any, tensors: Tensors) -> dict[str, Any]:
        """Return the tensors in a model's outputs by name."""
        return named_outputs(outputs, tensors, [one.name for one in self.inputs])[0]


def make_program(
    recordings: Sequence[Recording],
    model: Callable[..., Any],
    signature: inspect.Signature,
    tensors: Tensors,
    remedy: str,
) -> Program:
    """Make the program of a model from what was recorded."""
    read = [read_call(recording, signature, tensors, remedy) for recording in recordings]
    first = read[0]
    for other in read[1:]:
        check_equal(first, other, remedy)
    inputs = _inputs(recordings, read, remedy)
    program = Program(first.args, first.kwargs, inputs, (), first.left_out)
    cases, ignored = [], tuple[str, ...]()
    for recording, one in zip(recordings, read, strict=True):
        outputs = program(model, one.tensors)
        named, ignored = named_outputs(outputs, tensors, list(one.tensors))
        if not named:
            raise TaskError(f"the model returns no tensor, but a {type(outputs).__name__}", remedy)
        _check_unchanged(recording.calls[0].outputs, named, first.left_out, tensors, remedy)
        cases.append(Case(recording.size, one.tensors, named))
    return Program(first.args, first.kwargs, inputs, tuple(cases), first.left_out, ignored)


def _check_unchanged(
    recorded: Any, named: Mapping[str, Any], left_out: Sequence[str], tensors: Tensors, remedy: str
) -> None:
    """Raise TaskError if the program's call gives other outputs than the recorded one gave."""
    before = [tensors.to_numpy(tensor) for tensor in named_outputs(recorded, tensors)[0].values()]
    for name, tensor in named.items():
        array = tensors.to_numpy(tensor)
        alike = next((i for i, other in enumerate(before) if _close(array, other)), None)
        if alike is None and left_out:
            raise TaskError(
                f"without {', '.join(left_out)}, which is not there when it is served, the model's output "
                f"{name!r} differs from that in training",
                remedy,
            )
        if alike is None:
            raise TaskError(
                f"called twice with one batch, the model gives different {name!r}",
                "Does it compute with random numbers, or with attributes that change? Export the weights.",
            )
        del before[: alike + 1]


def _close(one: Any, other: Any) -> bool:
    return compare([one], [other]).relative <= LARGEST_DIFFERENCE


def _inputs(
    recordings: Sequence[Recording], read: Sequence[ReadCall], remedy: str
) -> tuple[ProgramInput, ...]:
    """Return the inputs; which axes are a batch's shows in batches of different sizes."""
    sizes = [recording.size for recording in recordings]
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name in read[0].tensors:
        shapes[name] = [tuple(one.tensors[name].shape) for one in read]
        kinds = {
            (_dtype(one.tensors[name]), len(shape)) for one, shape in zip(read, shapes[name], strict=True)
        }
        if len(kinds) > 1:
            raise TaskError(
                f"input {name!r} of the model has different types or numbers of axes in different batches: "
                + ", ".join(f"{dtype} with {axes}" for dtype, axes in sorted(kinds)),
                remedy,
            )
    lengths = _lengths(read[0], shapes, sizes)
    return tuple(
        ProgramInput(
            name,
            _dtype(tensor),
            shapes[name][0],
            tuple(
                BATCH if _is_batch(axis, sizes) else lengths.get(axis[1], "") for axis in _axes(shapes[name])
            ),
            name not in read[0].in_batch,
        )
        for name, tensor in read[0].tensors.items()
    )


# the sizes of one axis in all recordings, after its number
_Axis = tuple[int, tuple[int, ...]]


def _axes(shapes: Sequence[tuple[int, ...]]) -> list[_Axis]:
    return list(enumerate(zip(*shapes, strict=True)))


def _is_batch(axis: _Axis, sizes: Sequence[int]) -> bool:
    number, found = axis
    return list(found) == list(sizes) and (number == 0 or len(set(sizes)) > 1)


def _lengths(
    first: ReadCall, shapes: Mapping[str, list[tuple[int, ...]]], sizes: Sequence[int]
) -> dict[tuple[int, ...], str]:
    """Return the names of axes that may have any length, by their sizes in all recordings.

    These are axes whose size differs between batches, and those as long as the second axis of an input of
    whole numbers (samples, length), unless the call has this length as a constant.
    """
    found: dict[tuple[int, ...], str] = {}
    constants = {leaf for _, leaf in leaves([first.args, first.kwargs], lambda leaf: isinstance(leaf, Slot))
                 if type(leaf) is int}  # fmt: skip
    for name, tensor in first.tensors.items():
        for axis in _axes(shapes[name]):
            if _is_batch(axis, sizes):
                continue
            is_tokens = axis[0] == 1 and len(shapes[name][0]) == 2 and "int" in _dtype(tensor)
            if (len(set(axis[1])) > 1 or is_tokens) and not constants & set(axis[1]):
                found.setdefault(axis[1], LENGTH if not found else f"{LENGTH}_{len(found) + 1}")
    return found


def _dtype(tensor: Any) -> str:
    dtype = tensor.dtype
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")
