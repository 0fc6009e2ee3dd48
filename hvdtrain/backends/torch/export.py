"""PyTorch models in formats for serving, and weights files of PyTorch.

``tensorflow/export.py`` does the same for Keras.
"""

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from hvdtrain.backends.objective import Objective
from hvdtrain.backends.portable.files import Exported, check_fit, compare
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import CheckpointError, TaskError

Outputs = list[NDArray[Any]]
Tensors = dict[str, torch.Tensor]

# keys under which training scripts keep the weights among other things
_KEYS = ("state_dict", "model", "model_state_dict", "module")
_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and of torch.compile
_EXTERNAL_BYTES = 1 << 30  # an ONNX file holds 2 GiB; the weights of larger models lie beside it


def export_model(  # noqa: PLR0917 - passed on by the backend as they are
    model: torch.nn.Module,
    make_model: Callable[[], torch.nn.Module],
    objective: Objective,
    format_name: str,
    path: Path,
    batch: HostBatch,
) -> Exported:
    """Write a model, load it back and compare outputs.

    Args:
        model: the model, with its weights.
        make_model: makes another one like it.
        objective: the task's, to compare by where only it knows how to call the model.
        format_name: "safetensors", "pt", "torch-export" or "onnx".
        path: the file.
        batch: real samples.

    Raises:
        TaskError: If the model cannot be written in this format.
    """
    sample = {name: torch.from_numpy(np.array(array[0])) for name, array in batch.arrays.items()}
    plain = _with_weights(make_model, model.state_dict())  # without the hooks of Horovod's optimizer
    if format_name in ("safetensors", "pt"):
        _WRITE[format_name](plain, path)
        loaded = _with_weights(make_model, _read_weights(path))
        return compare(_outputs(plain, sample, objective), _outputs(loaded, sample, objective))
    if "inputs" not in sample:
        raise TaskError(
            f"a program takes batch['inputs'] alone; this task's samples have {sorted(sample)}",
            "Export the weights: --to safetensors.",
        )
    return _export_program(plain, format_name, path, sample["inputs"])


def _with_weights(make_model: Callable[[], torch.nn.Module], weights: Mapping[str, Any]) -> torch.nn.Module:
    model = make_model().cpu().eval()
    model.load_state_dict(weights)
    return model


def _outputs(model: torch.nn.Module, sample: Tensors, objective: Objective) -> Outputs:
    with torch.no_grad():
        if "inputs" in sample:
            try:
                return _flat(model(sample["inputs"]))
            except Exception:
                pass
        losses, metrics = objective(model, sample)
        return _flat((losses, *metrics.values()))


def _flat(outputs: Any) -> Outputs:
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return [_to_numpy(tensor) for tensor in tensors]


def _to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.detach()
    array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _write_safetensors(model: torch.nn.Module, path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise TaskError(f"the model's state_dict has {name}, which is no tensor", "Use --to pt.")
        # a tensor of its own under each name: the format knows no shared ones
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
    save_file(tensors, path, metadata={"format": "pt"})


def _write_pt(model: torch.nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path)


_WRITE = {"safetensors": _write_safetensors, "pt": _write_pt}


def _export_program(model: torch.nn.Module, format_name: str, path: Path, inputs: torch.Tensor) -> Exported:
    """Export with a dynamic batch dimension where the model allows it, else with this batch's size."""
    write = _write_onnx if format_name == "onnx" else _write_program
    problem: Exception | None = None
    for dimension in (torch.export.Dim("batch"), torch.export.Dim.DYNAMIC):
        try:
            # of a copy: it stays marked as dynamic
            program = torch.export.export(model, (inputs.clone(),), dynamic_shapes=({0: dimension},))
            run = write(program, path)
            whole, first = (_compare(model, run, part, "any batch size") for part in (inputs, inputs[:1]))
            return whole.joined(first)
        except Exception as error:
            problem = error
    try:
        run = write(torch.export.export(model, (inputs,)), path)
    except Exception as error:
        raise error from problem
    return _compare(model, run, inputs, f"batches of {len(inputs)} only")


def _compare(
    model: torch.nn.Module, run: Callable[[torch.Tensor], Outputs], inputs: torch.Tensor, batch: str
) -> Exported:
    with torch.no_grad():
        return compare(_flat(model(inputs)), run(inputs), batch)


def _write_program(program: Any, path: Path) -> Callable[[torch.Tensor], Outputs]:
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()

    def run(inputs: torch.Tensor) -> Outputs:
        with torch.no_grad():
            return _flat(loaded(inputs))

    return run


def _write_onnx(program: Any, path: Path) -> Callable[[torch.Tensor], Outputs]:
    import onnxruntime

    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    converted = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["inputs"])
    assert converted is not None  # the exporter by dynamo returns a program
    converted.save(path, external_data=size > _EXTERNAL_BYTES)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return partial(_run_session, session)


def _run_session(session: Any, inputs: torch.Tensor) -> Outputs:
    return list(session.run(None, {session.get_inputs()[0].name: inputs.numpy()}))


def load_weights_file(model: torch.nn.Module, path: Path) -> str:
    """Load a file of weights into a model; say what was understood.

    Raises:
        CheckpointError: If it cannot be read without running code, or does not fit.
    """
    found, notes = _unwrapped(_read_weights(path), path)
    expected = model.state_dict()
    # a count that PyTorch keeps since 0.4.1 and nothing here reads
    counts = {name: value for name, value in expected.items() if name.endswith(".num_batches_tracked")}
    found = counts | found
    check_fit(path, _shapes(expected), _shapes(found))
    model.load_state_dict(found)
    numbers = sum(value.numel() for value in found.values() if isinstance(value, torch.Tensor))
    return "; ".join([f"{len(found)} tensors, {numbers:,} numbers", *notes])


def _read_weights(path: Path) -> dict[str, Any]:
    """Read a file of weights; nothing in it is executed.

    Raises:
        CheckpointError: If that cannot be, with the reason.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: to read it, code that it names would have to run ({_reason(error)})",
            "Where you trust it, read it yourself and save the weights alone: "
            "torch.save(model.state_dict(), 'weights.pt').",
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # several kinds, by where the file is cut or changed
        raise CheckpointError(f"{path} is damaged or no file of weights ({_message_of(error)})") from None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state_dict")
    return dict(found)


def _reason(error: pickle.UnpicklingError) -> str:
    """Return the line of PyTorch's long text that says what was found."""
    lines = [line.strip().partition(". ")[0].rstrip(".") for line in str(error).splitlines()]
    return next((line for line in lines if "GLOBAL" in line or line.startswith("Unsupported")), lines[0])


def _message_of(error: Exception) -> str:
    first = str(error).partition(". ")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


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
