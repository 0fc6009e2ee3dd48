"""Programs of PyTorch models: the call that a task serves, written with dynamic axes."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from hvdtrain.backends.objective.serving import Tensors
from hvdtrain.backends.portable.program import BATCH, LENGTH, Program, ProgramInput, Written
from hvdtrain.backends.torch.state.tensors import as_array

_EXTERNAL_BYTES = 1 << 30  # an ONNX file holds 2 GiB; the weights of larger models lie next to it

TENSORS = Tensors(
    lambda value: isinstance(value, torch.Tensor),
    as_array,
    batch_of=lambda batch: {name: torch.from_numpy(np.array(a[0])) for name, a in batch.arrays.items()},
    serve="torch_serve",
)


class _Program(torch.nn.Module):
    """A model that takes the inputs of a program by name and returns its outputs by name."""

    def __init__(self, model: torch.nn.Module, program: Program) -> None:
        super().__init__()
        self.model = model

        def forward(**tensors: torch.Tensor) -> Any:
            named = program.named(program(tensors), TENSORS)
            return named["outputs"] if list(named) == ["outputs"] else named

        # torch.export reads the names of the inputs from the signature
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(one.name, kind) for one in program.inputs]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def write_program(
    model: torch.nn.Module,
    format_name: str,
    path: Path,
    program: Program,
    inputs: tuple[ProgramInput, ...],
) -> Written:
    """Write the program with dynamic axes if the model allows them, and load it back."""
    case = program.cases[0]
    # of copies: they stay marked as dynamic
    examples = {one.name: case.tensors[one.name].clone() for one in inputs}
    axes = {one.name: _dynamic(one) for one in inputs}
    if program.is_plain and _is_flat(model(*examples.values()), program):
        exported = torch.export.export(model, tuple(examples.values()), dynamic_shapes=tuple(axes.values()))
    else:
        module = _Program(model, program).eval()
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
