"""PyTorch models in formats for serving, also as programs with dynamic axes, and weights files of PyTorch."""

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from hvdtrain.backends.objective.model_call import Serving, Tensors
from hvdtrain.backends.portable.names import check_fit
from hvdtrain.backends.portable.program import (
    BATCH,
    LENGTH,
    Program,
    ProgramInput,
    Written,
    compare,
    make_program,
    write_and_compare,
)
from hvdtrain.backends.records import Exported
from hvdtrain.backends.torch.state.tensors import as_array
from hvdtrain.backends.torch.task_model import LOSS
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import CheckpointError, TaskError
from hvdtrain.storage.files import open_regular

Inputs = tuple[ProgramInput, ...]
Run = Callable[[Mapping[str, Any]], dict[str, NDArray[Any]]]
# keys under which training scripts keep the weights among other things
_KEYS = ("state_dict", "model", "model_state_dict", "module")
_COUNT = ".num_batches_tracked"
_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and of torch.compile
_EXTERNAL_BYTES = 1 << 30  # an ONNX file holds 2 GiB; the weights of larger models lie next to it

TENSORS = Tensors(
    lambda value: isinstance(value, torch.Tensor),
    as_array,
    batch_of=lambda batch: {name: torch.from_numpy(np.array(a[0])) for name, a in batch.arrays.items()},
    serve="torch_serve",
)


def export_model(  # noqa: PLR0917 - passed on by the backend as they are
    model: torch.nn.Module,
    make_model: Callable[[], torch.nn.Module],
    serving: Serving,
    format_name: str,
    path: Path,
    batches: Sequence[HostBatch],
) -> Exported:
    """Write a model, load it back and compare outputs."""
    plain = plain_model(model, make_model)
    if format_name in ("safetensors", "pt"):
        (_write_safetensors if format_name == "safetensors" else torch.save)(plain.state_dict(), path)
        loaded = _with_weights(make_model, _read_weights(path))
        return compare(*(_outputs(one, batches[0], serving) for one in (plain, loaded)))
    with torch.no_grad():
        program = make_program(partial(serving.outputs, plain), batches, TENSORS, serving.is_model_call)
        return write_and_compare(program, partial(_write_program, plain, format_name, path))


def plain_model(model: torch.nn.Module, make_model: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return a model with the same weights on the CPU, without the hooks of Horovod's optimizer."""
    return _with_weights(make_model, model.state_dict())


def _with_weights(make_model: Callable[[], torch.nn.Module], weights: Mapping[str, Any]) -> torch.nn.Module:
    model = make_model().cpu()
    own = hasattr(model, LOSS)  # else that is the task's loss, which is no part of the model that it makes
    _load(model, {name: value for name, value in weights.items() if own or not name.startswith(f"{LOSS}.")})
    return model.eval()  # which may change the weights


def _load(model: torch.nn.Module, weights: Mapping[str, Any]) -> None:
    """Load weights; an expanded buffer, into which PyTorch writes nothing, gets memory of its own."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.layout is torch.strided and 0 in buffer.stride():
                setattr(module, name, buffer.contiguous())
    model.load_state_dict(weights)


def _outputs(model: torch.nn.Module, batch: HostBatch, serving: Serving) -> list[NDArray[Any]]:
    torch.manual_seed(0)  # a model that computes with random numbers gets the same ones again
    with torch.no_grad():
        return serving.arrays(model, batch, TENSORS)


def _write_safetensors(weights: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {}
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            raise TaskError(f"the model's state_dict has {name}, which is no tensor", "Use --to pt.")
        # a tensor of its own under each name: the format knows no shared ones
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
    save_file(tensors, path, metadata={"format": "pt"})


class _Program(torch.nn.Module):
    """A model that takes the inputs of a program by name and returns its outputs by name."""

    def __init__(self, model: torch.nn.Module, program: Program) -> None:
        super().__init__()
        self.model = model

        def forward(**tensors: torch.Tensor) -> Any:
            named = program.named(program(tensors))
            return named["outputs"] if list(named) == ["outputs"] else named

        # torch.export reads the names of the inputs from the signature
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(one.name, kind) for one in program.inputs]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def _write_program(
    model: torch.nn.Module, format_name: str, path: Path, program: Program, inputs: Inputs
) -> Written:
    """Write the program with dynamic axes if the model allows them, and load it back."""
    case = program.cases[0]
    # of copies: they stay marked as dynamic
    examples = {one.name: case.tensors[one.name].clone() for one in inputs}
    auto = torch.export.Dim.AUTO
    axes = {one.name: {place: auto for place, axis in enumerate(one.axes) if axis} for one in inputs}
    outputs = model(*examples.values()) if program.is_plain else ()
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if leaf is not None]
    # whether torch.export takes the outputs as they are, in the order of their names
    if program.is_plain and [*map(id, tensors)] == [*map(id, program.named(outputs).values())]:
        exported = torch.export.export(model, tuple(examples.values()), dynamic_shapes=tuple(axes.values()))
    else:
        module = _Program(model, program).eval()
        exported = torch.export.export(module, (), examples, dynamic_shapes=axes)
    write = _write_onnx if format_name == "onnx" else _write_exported
    found, names = _dynamic_in(exported, inputs)
    return Written(write(exported, path, program, names), found)


def _dynamic_in(exported: Any, inputs: Inputs) -> tuple[Inputs, dict[str, str]]:
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


def _write_exported(exported: Any, path: Path, program: Program, names: Mapping[str, str]) -> Run:
    torch.export.save(exported, path)
    loaded = torch.export.load(path).module()
    is_plain = not exported.example_inputs[1]

    def run(inputs: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
        outputs = loaded(*inputs.values()) if is_plain else loaded(**inputs)
        return {name: as_array(tensor) for name, tensor in program.named(outputs).items()}

    return run


def _write_onnx(exported: Any, path: Path, program: Program, names: Mapping[str, str]) -> Run:
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


def load_weights_file(model: torch.nn.Module, path: Path) -> str:
    """Load a file of weights into a model; say what was understood."""
    found, notes = _unwrapped(_read_weights(path), path)
    expected = model.state_dict()
    # a count that PyTorch keeps since 0.4.1 and nothing here reads
    found = {name: value for name, value in expected.items() if name.endswith(_COUNT)} | found
    check_fit(path, _shapes(expected), _shapes(found))
    _load(model, {**expected, **found})
    numbers = sum(value.numel() for value in found.values() if isinstance(value, torch.Tensor))
    return "; ".join([f"{len(found)} tensors, {numbers:,} numbers", *notes])


def _read_weights(path: Path) -> dict[str, Any]:
    """Read a file of weights; nothing in it is executed."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        with open_regular(path) as file:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        lines = [line.strip().partition(". ")[0].rstrip(".") for line in str(error).splitlines()]
        found = next((line for line in lines if "GLOBAL" in line or line.startswith("Unsupported")), lines[0])
        raise CheckpointError(
            f"{path} is refused: to read it, code that it names would have to run ({found})",
            "Where you trust it, read it yourself and save the weights alone: "
            "torch.save(model.state_dict(), 'weights.pt').",
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # several kinds, by where the file is cut or changed
        problem = f"{type(error).__name__}: {str(error).partition('. ')[0]}".removesuffix(": ")
        raise CheckpointError(f"{path} is damaged or no file of weights ({problem})") from None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state_dict")
    return dict(found)


def _unwrapped(found: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the weights among what a training script saved, without prefixes; and what was done."""
    notes = []
    key = next((key for key in _KEYS if isinstance(found.get(key), Mapping)), None)
    if key is not None:
        found = dict(found[key])
        notes.append(f"of its key {key!r}")
    if not any(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(
            f"{path} holds no weights; its keys are {', '.join(map(str, list(found)[:8])) or 'none'}",
            f"They may lie under one of the keys {', '.join(_KEYS)}.",
        )
    for prefix in _PREFIXES:
        if found and all(str(name).startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
            notes.append(f"prefix {prefix!r} taken off")
    return found, notes


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return shapes by name; entries that are no tensors (extra state) have none."""
    return {name: tuple(getattr(value, "shape", ())) for name, value in tensors.items()}
