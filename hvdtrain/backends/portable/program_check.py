"""Writing a program with as many dynamic axes as its model allows, and comparing it with the model."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from hvdtrain.backends.objective.objective import Objective
from hvdtrain.backends.portable.files import LARGEST_DIFFERENCE, compare
from hvdtrain.backends.portable.program import BATCH, LENGTH, Program, ProgramInput, make_program
from hvdtrain.backends.portable.recording import (
    Call,
    ModelCalledError,
    Recording,
    Tensors,
    leaves,
    outputs_of,
    record_batches,
    record_serving,
)
from hvdtrain.backends.records import Exported
from hvdtrain.data.feed import HostBatch

Named = Mapping[str, Any]

_PROBED_SAMPLES = 2  # of which other lengths are made


@dataclass(frozen=True)
class Written:
    """A program that was written and loaded back."""

    # returns its outputs by name, as arrays, for inputs by name
    run: Callable[[Named], Mapping[str, NDArray[Any]]]
    inputs: tuple[ProgramInput, ...]  # its inputs, with the axes that are dynamic in it


# writes a program whose inputs may have these dynamic axes, and loads it back
Write = Callable[[tuple[ProgramInput, ...]], Written]


def write_and_compare(
    program: Program, model: Callable[..., Any], tensors: Tensors, write: Write
) -> Exported:
    """Write a program with as many dynamic axes as the model allows, and compare it with the model."""
    problem: Exception | None = None
    levels = [
        tuple(
            one.with_axes([axis if axis.startswith(kept) else "" for axis in one.axes])
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
        inputs=tuple(f"{one.name} {one.dtype} {_shape(_named_axes(one))}" for one in inputs),
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


def _output_axes(shapes: Sequence[tuple[int, ...]], seen: Sequence[Mapping[str, int]]) -> list[int | str]:
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
    return {
        axis: int(size)
        for one in inputs
        for axis, size in zip(one.axes, tensors[one.name].shape, strict=True)
        if axis
    }


def _limits(wanted: Sequence[ProgramInput], inputs: Sequence[ProgramInput]) -> str:
    """Return which batch sizes and lengths a program takes, as text."""
    fixed: dict[str, int] = {}
    free: dict[str, None] = {}
    for one, other in zip(wanted, inputs, strict=True):
        for axis, found, size in zip(one.axes, other.axes, one.shape, strict=True):
            if axis and not found:
                fixed[axis] = size
            elif axis:
                free[axis] = None
    words = {BATCH: ("any batch size", "batches of {} only"), LENGTH: ("any length", "sequences of {} only")}
    parts = []
    for name in dict.fromkeys([*free, *fixed]):
        any_size, only = words.get(name, (f"any {name}", name + " {} only"))
        parts.append(only.format(fixed[name]) if name in fixed else any_size)
    return ", ".join(parts)


def _named_axes(one: ProgramInput) -> list[int | str]:
    return [axis or size for axis, size in zip(one.axes, one.shape, strict=True)]


def _shape(axes: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, axes))}{',' * (len(axes) == 1)})"


def _notes(program: Program) -> Iterator[str]:
    computed = [one.name for one in program.inputs if one.is_computed]
    if computed:
        yield f"{', '.join(computed)}: computed by the task's loss from the batch, before it calls the model"
    if program.left_out:
        yield f"without {', '.join(program.left_out)}, which training gives the model"
    if program.ignored:
        yield f"without these outputs: {', '.join(program.ignored)}"


def _listed(numbers: Sequence[int]) -> str:
    *others, last = [f"{number:,}" for number in numbers]
    return f"{', '.join(others)} and {last}" if others else last


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
            return record_serving(serve, self.in_evaluation(model), batch, size)
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
        """Return the outputs of the model, or of the task's function for serving, for one batch by name."""
        recording = self.recorded(model, objective, batch, serve, is_one_call)
        function = getattr(model, self.method) if serve is None else partial(serve, model)
        signature = inspect.signature(function)
        return outputs_of(recording, self.in_evaluation(model), signature, self.tensors, self.remedy)

    def export(  # noqa: PLR0917 - those of export_model
        self,
        model: Any,
        objective: Objective,
        batches: Sequence[HostBatch],
        serve: Callable[..., Any] | None,
        otherwise: str,
        write: Callable[[Program, Callable[..., Any], tuple[ProgramInput, ...]], Written],
    ) -> Exported:
        """Write the call of a model that its task makes as a program, load it back and compare outputs."""
        called = self.in_evaluation(model)
        served = called if serve is None else partial(serve, called)
        signature = inspect.signature(getattr(model, self.method) if serve is None else served)
        recordings = record_batches(
            lambda batch: self.recorded(model, objective, self.batch_of(batch), serve), batches
        )
        program = make_program(recordings, served, signature, self.tensors, f"{self.remedy} {otherwise}")
        return write_and_compare(program, served, self.tensors, partial(write, program, served))
