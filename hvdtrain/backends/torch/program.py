"""Programs of PyTorch models: the call that training makes, recorded, and written with dynamic axes."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from hvdtrain.backends.portable.program import BATCH, LENGTH, Program, ProgramInput, Written
from hvdtrain.backends.portable.recording import Call, ModelCalledError, ModelCalls, Tensors
from hvdtrain.backends.torch.state.tensors import as_array

_EXTERNAL_BYTES = 1 << 30  # an ONNX file holds 2 GiB; the weights of larger models lie next to it


@contextmanager
def _watched(
    model: torch.nn.Module, calls: list[Call], elsewhere: list[str], is_one_call: bool
) -> Iterator[torch.nn.Module]:
    """Return a context in which calls of the model, and of its parts outside of these, are recorded."""
    running: list[torch.nn.Module] = []
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def enter(name: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not running and module is model:
            arguments.append((args, kwargs))
        elif not running and (any(True for _ in module.parameters()) or any(True for _ in module.buffers())):
            elsewhere.append(name)
        running.append(module)

    def leave(module: torch.nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        running.pop()
        if not running and module is model:
            calls.append(Call(*arguments.pop(), outputs))
            if is_one_call:
                raise ModelCalledError

    with ExitStack() as handles:
        for name, module in model.named_modules():
            before = partial(enter, name)
            handles.enter_context(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        yield model


TENSORS = Tensors(lambda value: isinstance(value, torch.Tensor), as_array)
CALLS = ModelCalls(
    TENSORS,
    "forward",
    in_evaluation=lambda model: model,
    watched=_watched,
    batch_of=lambda batch: {name: torch.from_numpy(np.array(a[0])) for name, a in batch.arrays.items()},
    remedy="Give the task torch_serve(model, batch), which returns the outputs to serve.",
)


class _Program(torch.nn.Module):
    """A model that takes the inputs of a program by name and returns its outputs by name."""

    def __init__(self, model: torch.nn.Module, served: Callable[..., Any], program: Program) -> None:
        super().__init__()
        self.model = model

        def forward(**tensors: torch.Tensor) -> Any:
            named = program.named(program(served, tensors), TENSORS)
            return named["outputs"] if list(named) == ["outputs"] else named

        # torch.export reads the names of the inputs from the signature
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(one.name, kind) for one in program.inputs]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def write_program(  # noqa: PLR0917 - the first of them are bound
    model: torch.nn.Module,
    format_name: str,
    path: Path,
    program: Program,
    served: Callable[..., Any],
    inputs: tuple[ProgramInput, ...],
) -> Written:
    """Write the program with dynamic axes if the model allows them, and load it back."""
    case = program.cases[0]
    # of copies: they stay marked as dynamic
    examples = {one.name: case.tensors[one.name].clone() for one in inputs}
    axes = {one.name: _dynamic(one) for one in inputs}
    if program.is_plain and _is_flat(served(*examples.values()), program):
        exported = torch.export.export(model, tuple(examples.values()), dynamic_shapes=tuple(axes.values()))
    else:
        module = _Program(model, served, program).eval()
        exported = torch.export.export(module, (), examples, dynamic_shapes=axes)
    write = _write_onnx if format_name == "onnx" else _write_exported
    found, names = _dynamic_in(exported, inputs)
    return Written(write(exported, path, program, names), found)


def _dynamic(one: ProgramInput) -> dict[int, Any]:
    return {number: torch.export.Dim.AUTO for number, axis in enumerate(one.axes) if axis}


def _is_flat(outputs: Any, program: Program) -> bool:
    """Return whether torch.export takes a model's outputs as they are, in the order of their names."""
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if leaf is not None]
    named = program.named(outputs, TENSORS)
    return len(tensors) == len(named) and all(
        one is other for one, other in zip(tensors, named.values(), strict=True)
    )


def _dynamic_in(
    exported: Any, inputs: tuple[ProgramInput, ...]
) -> tuple[tuple[ProgramInput, ...], dict[str, str]]:
    """Return the inputs with the axes that PyTorch found to be dynamic, and the names of its symbols."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    names: dict[str, str] = {}
    found = []
    for one, node in zip(inputs, exported.graph_signature.user_inputs, strict=True):
        axes = []
        for axis, size in zip(one.axes, nodes[node].meta["val"].shape, strict=True):
            symbol = str(size)
            if not symbol.isdigit() and symbol not in names:
                lengths = sum(name.startswith(LENGTH) for name in names.values())
                names[symbol] = axis if axis == BATCH else f"{LENGTH}_{lengths + 1}" if lengths else LENGTH
            axes.append(names.get(symbol, ""))
        found.append(replace(one, axes=tuple(axes)))
    return tuple(found), names


def _write_exported(
    exported: Any, path: Path, program: Program, names: Mapping[str, str]
) -> Callable[[Mapping[str, Any]], dict[str, NDArray[Any]]]:
    torch.export.save(exported, path)
    loaded = torch.export.load(path).module()
    is_plain = not exported.example_inputs[1]

    def run(inputs: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
        outputs = loaded(*inputs.values()) if is_plain else loaded(**inputs)
        return {name: as_array(tensor) for name, tensor in program.named(outputs, TENSORS).items()}

    return run


def _write_onnx(
    exported: Any, path: Path, program: Program, names: Mapping[str, str]
) -> Callable[[Mapping[str, Any]], dict[str, NDArray[Any]]]:
    import onnxruntime

    size = sum(tensor.nbytes for tensor in exported.state_dict.values())
    converted = torch.onnx.export(
        exported,
        dynamo=True,
        verbose=False,
        input_names=[one.name for one in program.inputs],
        output_names=list(program.output_names),
    )
    assert converted is not None  # the exporter by dynamo returns a program
    if hasattr(converted, "rename_axes"):
        converted.rename_axes(dict(names.items()))
    converted.save(path, external_data=size > _EXTERNAL_BYTES)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(inputs: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
        found = session.run(None, {name: as_array(tensor) for name, tensor in inputs.items()})
        return dict(zip(program.output_names, found, strict=True))

    return run
