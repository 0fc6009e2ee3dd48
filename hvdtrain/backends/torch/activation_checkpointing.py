"""Activation checkpointing in PyTorch: repeated blocks are computed again in the backward pass.

``tensorflow/activation_checkpointing.py`` does the same for Keras; what they share is in
``backends/activation_checkpointing.py``.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.backends.options import MARK, no_blocks

# what batch norm, and whatever names its statistics alike, moves in every forward pass
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def apply_activation_checkpointing(model: nn.Module) -> list[str]:
    """Let a model keep what goes into its blocks, and compute the rest again where it is needed.

    Returns:
        The names of the blocks.

    Raises:
        TaskError: If the model has none.
    """
    blocks = dict(_marked(model)) or dict(_repeated(model))
    if not blocks:
        raise no_blocks("torch_model()", "torch.nn.Module", "or keep two or more of it in a ModuleList")
    for block in blocks.values():
        block.forward = _recomputed(block)
    return list(blocks)


def _marked(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Return the outermost modules that say, or whose class says, that they are blocks."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if getattr(child, MARK, False) is True:
            yield inner, child
        else:
            yield from _marked(child, inner)


def _repeated(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Return what stands two or more times in a list of modules, and has parameters."""
    children = dict(module.named_children())
    alike: dict[type, list[str]] = {}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        for name, child in children.items():
            if next(child.parameters(), None) is not None:
                alike.setdefault(type(child), []).append(name)
    chosen = {name for names in alike.values() if len(names) > 1 for name in names}
    for name, child in children.items():
        inner = f"{path}.{name}" if path else name
        if name in chosen:
            yield inner, child
        else:
            yield from _repeated(child, inner)


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    """Return a forward pass that keeps nothing but its arguments; dropout draws the same again."""
    forward = block.forward
    has_statistics = any(name in module._buffers for module in block.modules() for name in _STATISTICS)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # a compiler repeats operations, never what they change
        if has_statistics and not torch.compiler.is_compiling():
            kwargs["context_fn"] = partial(_contexts, block)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return call


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward pass and of its repetition."""
    return nullcontext(), _statistics_kept(block)


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
