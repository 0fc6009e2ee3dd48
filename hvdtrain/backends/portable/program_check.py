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
    levels = _levels(program.inputs)
    for inputs in levels:
        check = _Check(program, model, tensors)
        is_last = inputs is levels[-1]
        try:
            done = check.compare(write(inputs))
        except Exception as error:
            if is_last:
                raise error from problem
            problem = error
            continue
        if is_last or done.relative <= LARGEST_DIFFERENCE:
            return done
    raise AssertionError("the last level returns or raises")


def _levels(inputs: tuple[ProgramInput, ...]) -> list[tuple[ProgramInput, ...]]:
    """Return the inputs with all dynamic axes, with that of the batch alone, and with none."""
    levels: list[tuple[ProgramInput, ...]] = []
    for kept in ((BATCH, LENGTH), (BATCH,), ()):
        level = tuple(
            one.with_axes([axis if axis.startswith(kept) and axis else "" for axis in one.axes])
            for one in inputs
        )
        if level not in levels:
            levels.append(level)
    return levels


class _Check:
    """Compares one program that was written with its model."""

    def __init__(self, program: Program, model: Callable[..., Any], tensors: Tensors) -> None:
        self._program = program
        self._model = model
        self._tensors = tensors
        self._worst = Exported(0.0, 1.0)
        self._sizes: list[int] = []  # of the batches that were compared
        self._lengths: list[int] = []
        self._notes: list[str] = []
        # sizes of the dynamic axes, and shapes of the outputs that the model gave for them
        self._seen: list[tuple[Mapping[str, int], Mapping[str, tuple[int, ...]]]] = []

    def compare(self, written: Written) -> Exported:
        """Compare on the real batches, and on other lengths of them."""
        for case in self._program.cases:
            if _fits(written.inputs, case.tensors):
                self._sizes.append(case.size)
                self._run(written, case.tensors, case.outputs)
        names = dict.fromkeys(axis for one in written.inputs for axis in one.axes if axis)
        if BATCH in names and len(set(self._sizes)) == 1:
            self._probe_batch(written)
        for name in names:
            if name.startswith(LENGTH):
                self._probe_lengths(written, name)
        return self._result(written)

    def _probe_batch(self, written: Written) -> None:
        """Compare on one sample, if the task's loss took no batch of another size."""
        one = _resized(written.inputs, self._program.cases[0].tensors, BATCH, 1, self._tensors)
        self._run(written, one, self._program.named(self._program(self._model, one), self._tensors))
        self._sizes.append(1)

    def _probe_lengths(self, written: Written, name: str) -> None:
        """Compare on a few samples cut to other lengths, and repeated to a larger one."""
        few = _resized(written.inputs, self._program.cases[0].tensors, BATCH, _PROBED_SAMPLES, self._tensors)
        length = next(few[one.name].shape[one.axes.index(name)] for one in written.inputs if name in one.axes)
        for wanted in dict.fromkeys((length // 2, 1, 2 * length)):
            if not 0 < wanted != length:
                continue
            probe = _resized(written.inputs, few, name, wanted, self._tensors)
            is_needed = wanted == length // 2  # the others may be too short or too long
            try:
                outputs = self._program.named(self._program(self._model, probe), self._tensors)
            except Exception:
                if is_needed:
                    raise
                continue
            try:
                self._run(written, probe, outputs)
            except Exception:
                if is_needed:
                    raise
                self._notes.append(f"the model takes a {name} of {wanted}, the program does not")

    def _run(self, written: Written, inputs: Named, outputs: Named) -> None:
        expected = {name: self._tensors.to_numpy(tensor) for name, tensor in outputs.items()}
        found = written.run(inputs)
        sizes = dict(_sizes(written.inputs, inputs))
        self._lengths += [size for name, size in sizes.items() if name.startswith(LENGTH)]
        self._seen.append((sizes, {name: array.shape for name, array in expected.items()}))
        done = compare([expected[name] for name in expected], [found[name] for name in expected])
        self._worst = self._worst.joined(done)

    def _result(self, written: Written) -> Exported:
        lengths = list(dict.fromkeys(self._lengths))
        checked = f"batches of {_listed(self._sizes)} of the task's data"
        program = self._program
        return replace(
            self._worst,
            batch=_limits(program.inputs, written.inputs),
            inputs=tuple(map(_describe_input, written.inputs)),
            outputs=tuple(f"{name} {_shape(self._output_axes(name))}" for name in program.output_names),
            arguments=tuple(one.name for one in program.inputs),
            is_plain=program.is_plain,
            checked=checked + (f", lengths {_listed(lengths)}" if lengths else ""),
            notes=(*_notes(program), *self._notes),
        )

    def _output_axes(self, name: str) -> list[int | str]:
        """Return an output's shape, with names for axes that were as long as a dynamic one each time."""
        shapes = [shapes[name] for _, shapes in self._seen]
        axes: list[int | str] = []
        for found in zip(*shapes, strict=True):
            like = (n for n in self._seen[0][0] if found == tuple(sizes.get(n) for sizes, _ in self._seen))
            differs = len(set(found)) > 1
            axes.append(next(like, "?") if differs else found[0])
        return axes


def _fits(inputs: Sequence[ProgramInput], tensors: Named) -> bool:
    """Return whether tensors have the size of each axis that is fixed."""
    return all(
        axis or size == expected
        for one in inputs
        for axis, size, expected in zip(one.axes, tensors[one.name].shape, one.shape, strict=True)
    )


def _resized(
    inputs: Sequence[ProgramInput], named: Named, name: str, size: int, tensors: Tensors
) -> dict[str, Any]:
    """Return the inputs with the axes of one name cut, or repeated, to a size."""
    result = dict(named)
    for one in inputs:
        tensor = result[one.name]
        for number, axis in enumerate(one.axes):
            if axis == name:
                if tensor.shape[number] < size:
                    tensor = tensors.concatenate([tensor] * -(-size // tensor.shape[number]), number)
                tensor = tensor[(slice(None),) * number + (slice(0, size),)]
        result[one.name] = tensor
    return result


def _sizes(inputs: Sequence[ProgramInput], tensors: Named) -> Iterator[tuple[str, int]]:
    """Yield name and size of the dynamic axes."""
    for one in inputs:
        for axis, size in zip(one.axes, tensors[one.name].shape, strict=True):
            if axis:
                yield axis, int(size)


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


def _describe_input(one: ProgramInput) -> str:
    return (
        f"{one.name} {one.dtype} {_shape([axis or n for axis, n in zip(one.axes, one.shape, strict=True)])}"
    )


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

    def export(  # noqa: PLR0917 - those of export_program
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
