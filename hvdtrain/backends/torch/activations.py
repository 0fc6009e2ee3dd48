"""Blocks of a PyTorch model that are computed again; ``tensorflow/activations.py`` does so for Keras."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.backends.options import find_blocks

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
