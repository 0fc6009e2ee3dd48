"""PyTorch models in formats for serving, and weights files of PyTorch."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from hvdtrain.backends.objective.serving import Serving
from hvdtrain.backends.portable.names import check_fit
from hvdtrain.backends.portable.program import compare, export_program
from hvdtrain.backends.records import Exported
from hvdtrain.backends.torch.program import TENSORS, write_program
from hvdtrain.backends.torch.task_model import without_loss
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import CheckpointError, TaskError
from hvdtrain.storage.files import open_regular

# keys under which training scripts keep the weights among other things
_KEYS = ("state_dict", "model", "model_state_dict", "module")
_COUNT = ".num_batches_tracked"
_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and of torch.compile


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
        if format_name == "pt":
            torch.save(plain.state_dict(), path)
        else:
            _write_safetensors(plain, path)
        loaded = _with_weights(make_model, _read_weights(path))
        return compare(*(_outputs(one, batches[0], serving) for one in (plain, loaded)))
    served = partial(serving.outputs, plain)
    with torch.no_grad():
        write = partial(write_program, plain, format_name, path)
        return export_program(TENSORS, served, serving.is_model_call, batches, write)


def plain_model(model: torch.nn.Module, make_model: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return a model with the same weights on the CPU, without the hooks of Horovod's optimizer."""
    return _with_weights(make_model, model.state_dict())


def _with_weights(make_model: Callable[[], torch.nn.Module], weights: Mapping[str, Any]) -> torch.nn.Module:
    model = make_model().cpu()
    _load(model, without_loss(model, weights))
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


def _write_safetensors(model: torch.nn.Module, path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise TaskError(f"the model's state_dict has {name}, which is no tensor", "Use --to pt.")
        # a tensor of its own under each name: the format knows no shared ones
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
    save_file(tensors, path, metadata={"format": "pt"})


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
