"""What an exported program computes: the call that a task serves, written with dynamic axes and compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.model_call import (
    Served,
    Tensors,
    identifier,
    named_outputs,
    nested_batch,
    tensors_of,
)
from hvdtrain.backends.records import Exported
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.numeric import SEPARATOR
from hvdtrain.errors import TaskError

Named = Mapping[str, Any]  # tensors by name
Shape = tuple[int, ...]
BATCH, LENGTH = "batch", "length"  # names of dynamic axes
_PROBED_SAMPLES = 2  # of which other lengths are made
LARGEST_DIFFERENCE = 1e-4  # of an output, relative to the largest; rounding alone gives some 1e-6
_SMALL_OUTPUT = 1e-3  # relative to the largest; such an output may be what is left of large numbers


@dataclass(frozen=True)
class ProgramInput:
    """An input of a program."""

    name: str
    column: str  # its flat name in a batch
    dtype: str
    shape: Shape  # in the first batch
    # for each axis, the name of what it can be, "batch" or "length"; empty for a fixed one
    axes: tuple[str, ...]

    def describe(self) -> str:
        """Return name, type and shape, as text."""
        return f"{self.name} {self.dtype} {_shape([a or n for a, n in self.sized()])}"

    def sizes(self) -> list[int | None]:
        """Return the sizes of the axes; None of dynamic ones."""
        return [None if axis else size for axis, size in self.sized()]

    def sized(self, tensor: Any = None) -> Iterator[tuple[str, int]]:
        """Return the axes with their sizes, of a tensor or in the first batch."""
        return zip(self.axes, self.shape if tensor is None else tensor.shape, strict=True)


Inputs = tuple[ProgramInput, ...]


class Case(NamedTuple):
    """Inputs of a program that a real batch gave, and the outputs that the model gave for them."""

    size: int  # number of samples
    tensors: Named
    outputs: Named


@dataclass(frozen=True)
class Program:
    """The call that a task serves, with named inputs."""

    served: Callable[[Any], Any]  # of a batch
    tensors: Tensors
    inputs: Inputs
    is_plain: bool  # whether it calls the model with one tensor and nothing else
    cases: tuple[Case, ...] = ()  # the first is that of the largest batch
    ignored: tuple[str, ...] = ()  # what the model returns in addition to tensors, as text

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in the model's order."""
        return tuple(self.cases[0].outputs)

    def __call__(self, tensors: Named) -> Any:
        """Return the model's outputs for these inputs, as they are."""
        return self.served(nested_batch({one.column: tensors[one.name] for one in self.inputs}))

    def named(self, outputs: Any) -> dict[str, Any]:
        """Return the tensors in a model's outputs by name."""
        return tensors_of(outputs, self.tensors, [one.name for one in self.inputs])

    def arrays(self, outputs: Mapping[str, Any]) -> list[NDArray[Any]]:
        """Return tensors as arrays."""
        return [self.tensors.to_numpy(tensor) for tensor in outputs.values()]


def make_program(
    served: Callable[[Any], Any], given: Sequence[HostBatch], tensors: Tensors, is_model_call: bool = False
) -> Program:
    """Make the program of what is served, from batches of which the first is the largest."""
    batches = [tensors.batch_of(batch) for batch in given]
    seen = Served(batches[0])
    outputs = served(seen)
    columns = seen.columns(batches[0])
    if not columns:
        raise TaskError(
            "the model is called without a tensor of the batch",
            f"Give the task {tensors.serve}(model, batch), which returns the outputs to serve.",
        )
    sizes = tuple(int(batch[columns[0]].shape[0]) for batch in batches)
    is_plain, cases = is_model_call and columns == ["inputs"], []
    program = Program(served, tensors, _inputs(columns, batches, sizes), is_plain)
    for size, batch in zip(sizes, batches, strict=True):
        inputs = {one.name: batch[one.column] for one in program.inputs}
        try:
            cases.append(Case(size, inputs, program.named(program(inputs))))
        except Exception:  # of another size than the first, which the model may not take
            if size == sizes[0]:
                raise
    again = program.arrays(cases[0].outputs)
    if not compare(program.arrays(program.named(outputs)), again).relative <= LARGEST_DIFFERENCE:
        raise TaskError(
            "called twice with one batch, the model gives different outputs",
            "Does it compute with random numbers, or with attributes that change? Export the weights.",
        )
    return replace(program, cases=tuple(cases), ignored=named_outputs(outputs, tensors)[1])


def _inputs(columns: Sequence[str], batches: Sequence[Named], sizes: Shape) -> Inputs:
    """Return the inputs; which axes are a batch's shows in batches of different sizes."""
    lengths: dict[Shape, str] = {}  # names of axes by their sizes in all batches
    inputs = []
    for column, name in zip(columns, _unique_names(columns), strict=True):
        shapes = [tuple(batch[column].shape) for batch in batches]
        kinds = {(_dtype(batch[column]), len(batch[column].shape)) for batch in batches}
        if len(kinds) > 1:
            raise TaskError(
                f"input {name!r} of the model has different types or numbers of axes in different batches: "
                + ", ".join(f"{dtype} with {count}" for dtype, count in sorted(kinds)),
                "Give all batches the same type and number of axes: see collate() of the task.",
            )
        dtype, axes = _dtype(batches[0][column]), list[str]()
        for number, found in enumerate(zip(*shapes, strict=True)):
            # any length have axes that differ between batches, and second ones of whole numbers
            is_free = len(set(found)) > 1 or (number == 1 and len(shapes[0]) == 2 and "int" in dtype)
            if found == sizes and (number == 0 or len(set(sizes)) > 1):
                axes.append(BATCH)
            elif is_free:
                count = f"_{len(lengths) + 1}" if lengths else ""
                axes.append(lengths.setdefault(found, LENGTH + count))
            else:
                axes.append("")
        inputs.append(ProgramInput(name, column, dtype, shapes[0], tuple(axes)))
    return tuple(inputs)


def _unique_names(columns: Sequence[str]) -> list[str]:
    """Return a name for each column: its last key, or all of it if that is a number or not the only one."""
    last = [column.rpartition(SEPARATOR)[2] for column in columns]
    names: list[str] = []
    for column, key in zip(columns, last, strict=True):
        is_known = last.count(key) == 1 and not key.isdigit()
        name = identifier((key,) if is_known else tuple(column.split(SEPARATOR)))
        while name in names:
            name += "_"
        names.append(name)
    return names


def _dtype(tensor: Any) -> str:
    return str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch.")


class Written(NamedTuple):
    """A program that was written and loaded back."""

    # returns its outputs by name, as arrays, for inputs by name
    run: Callable[[Named], Mapping[str, NDArray[Any]]]
    inputs: Inputs  # its inputs, with the axes that are dynamic in it


def write_and_compare(program: Program, write: Callable[[Program, Inputs], Written]) -> Exported:
    """Write a program with as many dynamic axes as the model allows, and compare it with the model."""
    problem: Exception | None = None
    inputs = program.inputs
    levels = [
        tuple(replace(one, axes=tuple(a if a.startswith(kept) else "" for a in one.axes)) for one in inputs)
        for kept in ((BATCH, LENGTH), BATCH, "fixed")
    ]
    *others, last = dict.fromkeys(levels)
    for inputs in others:
        try:
            done = _compared(program, write(program, inputs))
        except Exception as error:
            problem = error
            continue
        if done.relative <= LARGEST_DIFFERENCE:
            return done
    try:
        return _compared(program, write(program, last))
    except Exception as error:
        raise error from problem


def _compared(program: Program, written: Written) -> Exported:
    """Compare a program with its model: on the real batches that fit, and on parts of the first."""
    inputs, first = written.inputs, program.cases[0].tensors
    cases = [case for case in program.cases if _fits(inputs, case.tensors)]
    pairs, sizes = [(case.tensors, case.outputs) for case in cases], [case.size for case in cases]
    parts: list[Named] = []
    if BATCH in _sizes(inputs, first) and len(set(sizes)) == 1:  # the model took no other size
        parts.append(_cut(inputs, first, BATCH, 1))
        sizes.append(1)
    few = _cut(inputs, first, BATCH, _PROBED_SAMPLES)
    for name, length in _sizes(inputs, few).items():
        if name.startswith(LENGTH) and length > 1:
            parts.append(_cut(inputs, few, name, length // 2))
    pairs += [(part, program.named(program(part))) for part in parts]
    worst = Exported(0.0, 1.0)
    for given, outputs in pairs:
        found = written.run(given)
        worst = worst.joined(compare(program.arrays(outputs), [found[name] for name in outputs]))
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
        notes=(f"without these outputs: {', '.join(program.ignored)}",) if program.ignored else (),
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
    pairs = [zip(one.sizes(), tensors[one.name].shape, strict=True) for one in inputs]
    return all(size in (None, found) for of_input in pairs for size, found in of_input)


def _cut(inputs: Sequence[ProgramInput], named: Named, name: str, size: int) -> dict[str, Any]:
    """Return the inputs with the axes of one name cut to a size."""
    cuts = {one.name: tuple(slice(size if axis == name else None) for axis in one.axes) for one in inputs}
    return {key: named[key][cut] for key, cut in cuts.items()}


def _sizes(inputs: Sequence[ProgramInput], tensors: Named) -> dict[str, int]:
    """Return the sizes of the dynamic axes."""
    return {axis: int(n) for one in inputs for axis, n in one.sized(tensors[one.name]) if axis}


def _limits(wanted: Sequence[ProgramInput], inputs: Sequence[ProgramInput]) -> str:
    """Return which batch sizes and lengths a program takes, as text."""
    sizes: dict[str, int] = {}  # of the axes that could be dynamic; 0 if they are
    for one, other in zip(wanted, inputs, strict=True):
        for (axis, size), found in zip(one.sized(), other.axes, strict=True):
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


def _listed(numbers: Sequence[int]) -> str:
    *others, last = [f"{number:,}" for number in numbers]
    return f"{', '.join(others)} and {last}" if others else last


def compare(expected: Sequence[NDArray[Any]], found: Sequence[NDArray[Any]]) -> Exported:
    """Compare two models' outputs on one batch, each output relative to its largest; NaN equals NaN."""
    finite = [np.abs(array.astype(np.float64)) for array in expected]
    scales = [float(array[np.isfinite(array)].max(initial=0.0)) for array in finite]
    scale = max(scales, default=0.0)
    if [one.shape for one in expected] != [other.shape for other in found]:
        return Exported(np.inf, scale or 1.0)
    done = Exported(0.0, scale or 1.0)
    for one, other, own in zip(expected, found, scales, strict=True):
        a, b = one.astype(np.float64), other.astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.abs(a - b)
        apart[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
        largest = float(np.where(np.isnan(apart), np.inf, apart).max(initial=0.0))
        done = done.joined(Exported(largest, max(own, _SMALL_OUTPUT * scale) or 1.0))
    return done
