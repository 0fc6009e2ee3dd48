"""What an exported program computes: the call that a task's loss makes of its model, written and compared."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from numpy.typing import NDArray

from hvdtrain.backends.objective.objective import Objective
from hvdtrain.backends.portable.files import LARGEST_DIFFERENCE, compare
from hvdtrain.backends.portable.recording import (
    Arguments,
    ModelCalls,
    ReadCall,
    Recording,
    Slot,
    Tensors,
    dotted,
    leaves,
    mapped,
    named_outputs,
    read_call,
    tensors_of,
)
from hvdtrain.backends.records import Exported
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError

Named = Mapping[str, Any]  # tensors by name
Shape = tuple[int, ...]

BATCH, LENGTH = "batch", "length"  # names of dynamic axes
_PROBED_SAMPLES = 2  # of which other lengths are made


@dataclass(frozen=True)
class ProgramInput:
    """An input of a program."""

    name: str  # its name
    dtype: str  # type of its elements
    shape: Shape  # its shape in the first batch
    # for each axis, the name of what it can be, "batch" or "length"; empty for a fixed one
    axes: tuple[str, ...]
    is_computed: bool  # whether the loss computes it, so that it is in no batch

    def describe(self) -> str:
        """Return name, type and shape, as text."""
        return (
            f"{self.name} {self.dtype} {_shape([a or n for a, n in zip(self.axes, self.shape, strict=True)])}"
        )


class Case(NamedTuple):
    """Inputs of a program that a real batch gave, and the outputs that the model gave for them."""

    size: int  # number of samples
    tensors: Named  # the inputs
    outputs: Named


@dataclass(frozen=True)
class Program:
    """A call of the model with named inputs."""

    arguments: Arguments  # with slots for the inputs
    inputs: tuple[ProgramInput, ...]
    cases: tuple[Case, ...] = ()  # the first is that of the largest batch
    ignored: tuple[str, ...] = ()  # what the model returns in addition to tensors, as text

    @property
    def is_plain(self) -> bool:
        """Whether the model is called with one tensor and nothing else."""
        (first, *rest) = self.arguments.values.items()
        kind = getattr(self.arguments.signature.parameters.get(first[0]), "kind", None)
        by_place = kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return not rest and by_place and isinstance(first[1], Slot)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the model's order."""
        return tuple(self.cases[0].outputs)

    def __call__(self, model: Callable[..., Any], tensors: Named) -> Any:
        """Call the model with these inputs; return its outputs as they are."""
        return self.arguments.call(
            model,
            mapped(
                self.arguments.values,
                lambda leaf: tensors[leaf.name] if isinstance(leaf, Slot) else leaf,
                lambda leaf: isinstance(leaf, Slot),
            ),
        )

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
    first = read[0].arguments
    for other in read[1:]:
        _check_equal(first, other.arguments, remedy)
    inputs = _inputs(recordings, read, remedy)
    program = Program(first, inputs)
    cases, ignored = [], tuple[str, ...]()
    for recording, one in zip(recordings, read, strict=True):
        outputs = program(model, one.tensors)
        named = tensors_of(outputs, tensors, remedy, list(one.tensors))
        ignored = named_outputs(outputs, tensors)[1]
        _check_unchanged(recording.calls[0].outputs, named, first.left_out, tensors, remedy)
        cases.append(Case(recording.size, one.tensors, named))
    return Program(first, inputs, tuple(cases), ignored)


def _check_equal(first: Arguments, other: Arguments, remedy: str) -> None:
    """Raise TaskError if two batches led to different calls."""
    if (first.values, first.left_out) == (other.values, other.left_out):
        return
    one, two = (dict(leaves(read.values, lambda leaf: isinstance(leaf, Slot))) for read in (first, other))
    differing = next((path for path in one | two if one.get(path, one) != two.get(path, two)), ("labels",))
    found = " and ".join(
        f"the tensor {leaf.name}" if isinstance(leaf, Slot) else repr(leaf)
        for leaf in (one.get(differing), two.get(differing))
    )
    raise TaskError(
        f"the loss calls the model differently for different batches: {dotted(differing)} is {found}", remedy
    )


def _check_unchanged(
    recorded: Any, named: Named, left_out: Sequence[str], tensors: Tensors, remedy: str
) -> None:
    """Raise TaskError if the program's call gives other outputs than the recorded one gave."""
    before = [tensors.to_numpy(tensor) for tensor in named_outputs(recorded, tensors)[0].values()]
    for name, tensor in named.items():
        array = tensors.to_numpy(tensor)
        close = (compare([array], [other]).relative <= LARGEST_DIFFERENCE for other in before)
        alike = next((i for i, is_close in enumerate(close) if is_close), None)
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


def _inputs(
    recordings: Sequence[Recording], read: Sequence[ReadCall], remedy: str
) -> tuple[ProgramInput, ...]:
    """Return the inputs; which axes are a batch's shows in batches of different sizes."""
    sizes, first = tuple(recording.size for recording in recordings), read[0]
    constants = {leaf for _, leaf in leaves(first.arguments.values, lambda leaf: isinstance(leaf, Slot))
                 if type(leaf) is int}  # fmt: skip
    lengths: dict[Shape, str] = {}  # names of axes by their sizes in all recordings
    axes: dict[str, list[Shape]] = {}
    for name, tensor in first.tensors.items():
        kinds = {(_dtype(one.tensors[name]), len(one.tensors[name].shape)) for one in read}
        if len(kinds) > 1:
            raise TaskError(
                f"input {name!r} of the model has different types or numbers of axes in different batches: "
                + ", ".join(f"{dtype} with {count}" for dtype, count in sorted(kinds)),
                remedy,
            )
        axes[name] = list(zip(*(tuple(one.tensors[name].shape) for one in read), strict=True))
        for number, found in enumerate(axes[name]):
            # any length have axes that differ between batches, and second ones of whole numbers
            is_tokens = number == 1 and len(axes[name]) == 2 and "int" in _dtype(tensor)
            is_free = (len(set(found)) > 1 or is_tokens) and not constants & set(found)
            if is_free and not _is_batch(number, found, sizes):
                lengths.setdefault(found, LENGTH if not lengths else f"{LENGTH}_{len(lengths) + 1}")
    return tuple(
        ProgramInput(
            name,
            _dtype(tensor),
            tuple(found[0] for found in axes[name]),
            tuple(
                BATCH if _is_batch(number, found, sizes) else lengths.get(found, "")
                for number, found in enumerate(axes[name])
            ),
            name not in first.in_batch,
        )
        for name, tensor in first.tensors.items()
    )


def _is_batch(number: int, found: Shape, sizes: Shape) -> bool:
    """Return whether an axis, by its sizes in all recordings, is that of the samples."""
    return found == sizes and (number == 0 or len(set(sizes)) > 1)


def _dtype(tensor: Any) -> str:
    return str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch.")


class Written(NamedTuple):
    """A program that was written and loaded back."""

    # returns its outputs by name, as arrays, for inputs by name
    run: Callable[[Named], Mapping[str, NDArray[Any]]]
    inputs: tuple[ProgramInput, ...]  # its inputs, with the axes that are dynamic in it


def write_and_compare(
    program: Program,
    model: Callable[..., Any],
    tensors: Tensors,
    write: Callable[[tuple[ProgramInput, ...]], Written],
) -> Exported:
    """Write a program with as many dynamic axes as the model allows, and compare it with the model."""
    problem: Exception | None = None
    levels = [
        tuple(
            replace(one, axes=tuple(axis if axis.startswith(kept) else "" for axis in one.axes))
            for one in program.inputs
        )
        for kept in ((BATCH, LENGTH), BATCH, "fixed")
    ]
    for inputs in dict.fromkeys(levels):
        is_last = inputs == levels[-1]
        try:
            done = _compared(program, model, tensors, write(inputs))
        except Exception as error:
            if is_last:
                raise error from problem
            problem = error
            continue
        if is_last or done.relative <= LARGEST_DIFFERENCE:
            return done
    raise AssertionError("the last level returns or raises")


def _compared(program: Program, model: Callable[..., Any], tensors: Tensors, written: Written) -> Exported:
    """Compare a program with its model: on the real batches that fit, and on parts of the first."""
    inputs, first = written.inputs, program.cases[0].tensors
    cases = [case for case in program.cases if _fits(inputs, case.tensors)]
    pairs, sizes = [(case.tensors, case.outputs) for case in cases], [case.size for case in cases]
    parts: list[Named] = []
    if BATCH in _sizes(inputs, first) and len(set(sizes)) == 1:  # the task's loss took no other size
        parts.append(_cut(inputs, first, BATCH, 1))
        sizes.append(1)
    few = _cut(inputs, first, BATCH, _PROBED_SAMPLES)
    for name, length in _sizes(inputs, few).items():
        if name.startswith(LENGTH) and length > 1:
            parts.append(_cut(inputs, few, name, length // 2))
    pairs += [(part, program.named(program(model, part), tensors)) for part in parts]
    worst = Exported(0.0, 1.0)
    for given, outputs in pairs:
        found = written.run(given)
        expected = [tensors.to_numpy(tensor) for tensor in outputs.values()]
        worst = worst.joined(compare(expected, [found[name] for name in outputs]))
    seen = [_sizes(inputs, given) for given, _ in pairs]
    lengths = dict.fromkeys(n for of_axes in seen for name, n in of_axes.items() if name.startswith(LENGTH))
    return replace(
        worst,
        batch=_limits(program.inputs, inputs),
        inputs=tuple(one.describe() for one in inputs),
        outputs=tuple(
            f"{name} {_shape(_output_axes([tuple(outputs[name].shape) for _, outputs in pairs], seen))}"
            for name in program.output_names
        ),
        arguments=tuple(one.name for one in program.inputs),
        is_plain=program.is_plain,
        checked=f"batches of {_listed(sizes)} of the task's data"
        + (f", lengths {_listed([*lengths])}" if lengths else ""),
        notes=tuple(_notes(program)),
    )


def _output_axes(shapes: Sequence[Shape], seen: Sequence[Mapping[str, int]]) -> list[int | str]:
    """Return an output's shape, with names for axes that were as long as a dynamic one each time."""
    axes: list[int | str] = []
    for found in zip(*shapes, strict=True):
        like = (name for name in seen[0] if found == tuple(sizes.get(name) for sizes in seen))
        axes.append(next(like, "?") if len(set(found)) > 1 else found[0])
    return axes


def _fits(inputs: Sequence[ProgramInput], tensors: Named) -> bool:
    """Return whether tensors have the size of each axis that is fixed."""
    return all(
        axis or size == expected
        for one in inputs
        for axis, size, expected in zip(one.axes, tensors[one.name].shape, one.shape, strict=True)
    )


def _cut(inputs: Sequence[ProgramInput], named: Named, name: str, size: int) -> dict[str, Any]:
    """Return the inputs with the axes of one name cut to a size."""
    return {
        one.name: named[one.name][tuple(slice(size if axis == name else None) for axis in one.axes)]
        for one in inputs
    }


def _sizes(inputs: Sequence[ProgramInput], tensors: Named) -> dict[str, int]:
    """Return the sizes of the dynamic axes."""
    sizes = ((axis, n) for one in inputs for axis, n in zip(one.axes, tensors[one.name].shape, strict=True))
    return {axis: int(size) for axis, size in sizes if axis}


def _limits(wanted: Sequence[ProgramInput], inputs: Sequence[ProgramInput]) -> str:
    """Return which batch sizes and lengths a program takes, as text."""
    sizes: dict[str, int] = {}  # of the axes that could be dynamic; 0 if they are
    for one, other in zip(wanted, inputs, strict=True):
        for axis, found, size in zip(one.axes, other.axes, one.shape, strict=True):
            if axis:
                sizes[axis] = size if not found else sizes.get(axis, 0)
    words = {BATCH: ("any batch size", "batches of {} only"), LENGTH: ("any length", "sequences of {} only")}
    parts = []
    for name, size in sorted(sizes.items(), key=lambda item: item[1] > 0):
        any_size, only = words.get(name, (f"any {name}", name + " {} only"))
        parts.append(only.format(size) if size else any_size)
    return ", ".join(parts)


def _shape(axes: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, axes))}{',' * (len(axes) == 1)})"


def _notes(program: Program) -> Iterator[str]:
    computed = [one.name for one in program.inputs if one.is_computed]
    if computed:
        yield f"{', '.join(computed)}: computed by the task's loss from the batch, before it calls the model"
    if left_out := program.arguments.left_out:
        yield f"without {', '.join(left_out)}, which training gives the model"
    if program.ignored:
        yield f"without these outputs: {', '.join(program.ignored)}"


def _listed(numbers: Sequence[int]) -> str:
    *others, last = [f"{number:,}" for number in numbers]
    return f"{', '.join(others)} and {last}" if others else last


def export_program(  # noqa: PLR0917 - those of export_model
    calls: ModelCalls,
    model: Any,
    objective: Objective,
    batches: Sequence[HostBatch],
    serve: Callable[..., Any] | None,
    otherwise: str,
    write: Callable[[Program, Callable[..., Any], tuple[ProgramInput, ...]], Written],
) -> Exported:
    """Write the call of a model that its task makes as a program, load it back and compare outputs."""
    served, signature = calls.served(model, serve)
    recordings: list[Recording] = []
    for batch in batches:
        try:
            recordings.append(calls.recorded(model, objective, calls.batch_of(batch), serve))
        except Exception:  # of another size than the first, which the loss may not take
            if batch.indices.shape == batches[0].indices.shape:
                raise
    program = make_program(recordings, served, signature, calls.tensors, f"{calls.remedy} {otherwise}")
    return write_and_compare(program, served, calls.tensors, partial(write, program, served))
