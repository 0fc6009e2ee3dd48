"""The model that a task makes."""

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from hvdtrain.backends.options import check_gpus, find_blocks
from hvdtrain.backends.records import DeviceMemory
from hvdtrain.backends.workers import HorovodWorkers
from hvdtrain.errors import EnvironmentFault, TaskError

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def float_bits_of(model: torch.nn.Module) -> int:
    """Return the bits of the numbers that a model takes, 32 or 64: those of its first matrix if any."""
    given = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    first = next((p for p in given if p.dim() > 1), given[0] if given else None)
    return 64 if first is not None and first.dtype in (torch.float64, torch.complex128) else 32


def autocast(precision: str, device: torch.device, cache: bool = True) -> AbstractContextManager[Any]:
    """Return a context for the model and its loss: operations that bear it compute in half precision."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_HALVES[precision], cache_enabled=cache)


def cast_outputs_to_fp32(model: torch.nn.Module, precision: str) -> None:
    """Cast the model's outputs to fp32, so that losses and metrics are computed in it."""
    if precision == "fp32":
        return

    def cast(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        half = _HALVES.values()
        return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in half else t, outputs)

    is_called = type(model).forward is not torch.nn.Module.forward
    for module in [model] if is_called else model.children():
        module.register_forward_hook(cast)


# what batch norm, and whatever names its statistics alike, moves in every forward pass
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def apply_activation_checkpointing(model: nn.Module) -> None:
    """Let a model keep what goes into its blocks, and compute the rest again where it is needed."""
    remedy = "torch_model()", "torch.nn.Module", "or keep two or more of it in a ModuleList"
    for block in find_blocks(model, nn.Module.named_children, _is_repeatable, remedy):
        block.forward = _recomputed(block)


def _is_repeatable(module: nn.Module, child: nn.Module) -> bool:
    """Return whether a part that has parameters stands in a list of modules."""
    return isinstance(module, nn.ModuleList | nn.Sequential) and next(child.parameters(), None) is not None


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    """Return a forward pass that keeps nothing but its arguments; dropout draws the same again."""
    forward = block.forward
    has_statistics = any(name in module._buffers for module in block.modules() for name in _STATISTICS)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # a compiler repeats operations, never what they change
        if has_statistics and not torch.compiler.is_compiling():
            # of the forward pass, and of its repetition
            kwargs["context_fn"] = lambda: (nullcontext(), _statistics_kept(block))
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return call


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Context after which moving statistics are what they were: the forward pass has moved them already."""
    buffers = [
        tensor
        for module in block.modules()
        for name, tensor in module._buffers.items()
        if name in _STATISTICS and tensor is not None
    ]
    before = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            # past autograd's count of changes: the backward pass does not read them in training
            buffer.data.copy_(value)


# those of a LightningModule that decide what is computed
_METHODS = ("training_step", "validation_step", "configure_optimizers")


def unused_methods(model: torch.nn.Module) -> list[str]:
    """Return notes on what the model brings that training does not use."""
    found = [name for name in _METHODS if callable(getattr(model, name, None))]
    if not found:
        return []
    return [
        f"{' and '.join(found)} of the model (of PyTorch Lightning) are not called: loss, metrics and "
        "optimizer are the task's and the config's; torch_loss and torch_optimizer of the task replace them"
    ]


_REMEDY = "Install a C++ compiler and Python's headers (Debian: g++, python3-dev), or leave --compile out."
# dropout draws what it draws without a compiler, so the loss curve stays the same; and no pool of
# processes compiles in addition to the workers, which have the host's cores already
_OPTIONS: dict[str, Any] = {"fallback_random": True, "compile_threads": 1}


def check_compiler(device: torch.device, host: str) -> None:
    """Check that this worker can compile, by compiling something small. Local: no collective."""
    command = os.environ.get("CXX", "g++")  # what PyTorch calls
    if device.type == "cpu" and shutil.which(shlex.split(command)[0]) is None:
        raise EnvironmentFault(f"--compile: {host} has no C++ compiler {command} for torch.compile", _REMEDY)
    try:
        torch.compile(lambda x: x + 1, options=_OPTIONS)(torch.zeros(2, device=device))
    except Exception as error:  # the compiler's, the linker's, the cache's, ...
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = next((line for line in lines if "error:" in line), lines[0] if lines else "")
        raise EnvironmentFault(
            f"--compile: torch.compile fails on {host}: {type(error).__name__}: {message[:300]}", _REMEDY
        ) from None


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model itself, whose calls are compiled when they first happen, anew for other shapes."""
    model.compile(options=_OPTIONS)
    return model


def choose_device(wanted: str, workers: HorovodWorkers) -> torch.device:
    """Return the device of this worker, chosen by its rank on the host. Local: no collective."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    check_gpus(cards, f"PyTorch {torch.__version__}", "a CUDA build of PyTorch", workers)
    return torch.device("cuda", workers.local_rank)


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU; None on the CPU."""
    if device.type != "cuda":
        return None
    _, limit = torch.cuda.mem_get_info(device)
    return DeviceMemory(int(torch.cuda.max_memory_allocated(device)), limit)


LOSS = "loss"  # the name in the model of a loss that has parameters


def make_model(task: Any) -> torch.nn.Module:
    """Return a task's model, as the task makes it."""
    model = task.torch_model()
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"torch_model() must give a torch.nn.Module, found {type(model).__name__}")
    scripted = [name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        part = f"the part {scripted[0]} of torch_model()" if scripted[0] else "torch_model()"
        raise TaskError(
            f"{part} is a module of torch.jit.script or trace, which hvdtrain does not train",
            "Give the module itself, which --compile compiles; script what hvdtrain.load() returns.",
        )
    loss = getattr(task, "torch_loss", None) or getattr(task, "loss", None)
    if not isinstance(loss, torch.nn.Module) or next(loss.parameters(), None) is None:
        return model
    # a loss that has parameters becomes a part of the model, so that it is trained, saved and sent with it
    if hasattr(model, LOSS):
        raise TaskError(
            f"the task's loss has parameters, which become the model's part {LOSS!r}, a name that it has",
            "Name the model's part differently.",
        )
    if isinstance(model, torch.nn.Sequential):  # which calls all of its parts
        kind = type(model)
        model.__class__ = type(kind.__name__, (_WithLoss, kind), {"__module__": kind.__module__})
    model.add_module(LOSS, loss)
    return model


class _WithLoss(torch.nn.Sequential):
    """A Sequential that does not call the loss."""

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return (part for name, part in self._modules.items() if name != LOSS and part is not None)

    def __len__(self) -> int:
        return len(self._modules) - 1


def foreign_leaf(losses: torch.Tensor, model: torch.nn.Module) -> torch.Tensor | None:
    """Return a parameter outside of a model for which losses have a gradient, or another leaf."""
    own, seen = {id(parameter) for parameter in model.parameters()}, set[Any]()
    found: torch.Tensor | None = None
    nodes = [losses.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and leaf.is_leaf and id(leaf) not in own:
            if isinstance(leaf, torch.nn.Parameter):
                return leaf
            found = leaf
        nodes += [following for following, _ in node.next_functions]
    return found


def check_parts(model: torch.nn.Module) -> list[str]:
    """Return notes on what several workers compute otherwise, since each has a part of the batch."""
    notes = []
    for name, layer in model.named_modules():
        is_embedding = isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if is_embedding and layer.max_norm is not None:
            raise TaskError(
                f"the embedding {name!r} has max_norm, which scales the vectors that are looked up in place; "
                "each worker looks up those of its own samples, so the weights of the workers would differ",
                "Leave max_norm out and scale the vectors in the forward pass, such as "
                "functional.embedding(x, torch.renorm(weight, 2, 0, max_norm)); or use one worker.",
            )
        if is_embedding and layer.scale_grad_by_freq:
            notes.append(
                f"{name}: scale_grad_by_freq counts how often an id occurs in each worker's samples, not in "
                "those of all workers, so the curve depends on the number of workers"
            )
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    named = model.named_parameters()
    if hooked := [name for name, one in named if any(getattr(one, kind, None) for kind in kinds)]:
        notes.append(
            f"{', '.join(hooked)}: hooks of the model are given each worker's part of the gradient; if they "
            "are not linear, such as clipping, the curve depends on the number of workers (--clip-norm clips "
            "the sum)"
        )
    return notes
