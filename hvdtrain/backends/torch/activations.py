"""What a micro-batch takes of memory in PyTorch; ``tensorflow/activations.py`` finds the same for Keras."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
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


class ActivationMeter:
    """Follows each memory block that operations make for tensors, within its context.

    What kernels take for themselves, such as scratch memory of a convolution, is not seen.
    """

    def __init__(self, model: nn.Module, others: Iterable[torch.Tensor]) -> None:
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._mode = _Blocks([*model.parameters(), *model.buffers(), *others])

    def __enter__(self) -> None:
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._mode.take_gradient)  # type: ignore[no-untyped-call]
            for one in self._parameters
        ]
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def found(self) -> int:
        """Return the most that was taken at once, without the gradients of the parameters."""
        return self._mode.peak_bytes()


class _Blocks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes when memory blocks of tensors come and go."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        strided = (tensor for tensor in known if tensor.layout is torch.strided)
        self._known = {tensor.untyped_storage()._cdata for tensor in strided}
        self._blocks: dict[int, tuple[weakref.ref[Any], int]] = {}  # those that are there
        self._changes: list[int] = []  # bytes, of blocks that come, and go
        self._gradients: set[int] = set()  # places in the list above

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import a compiler, for a second and 50 MiB

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do an operation, and note what it makes."""
        made = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_iter(made):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._take(tensor)
        return made

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """Leave out the block of a parameter's gradient."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if (block := self._blocks.get(gradient.untyped_storage()._cdata)) is not None:
            self._gradients.add(block[1])

    def peak_bytes(self) -> int:
        """Return the most that blocks took at once, without gradients of parameters."""
        taken = most = 0
        for place, change in enumerate(self._changes):
            if place not in self._gradients:
                taken += change
                most = max(most, taken)
        return most

    def _take(self, tensor: torch.Tensor) -> None:
        block = tensor.untyped_storage()
        key = block._cdata
        if key in self._known or key in self._blocks:
            return
        place, size = len(self._changes), block.nbytes()
        self._blocks[key] = weakref.ref(block, partial(self._gone, key, place, size)), place
        self._changes.append(size)

    def _gone(self, key: int, place: int, size: int, _: Any) -> None:
        del self._blocks[key]
        if place in self._gradients:
            self._gradients.add(len(self._changes))
        self._changes.append(-size)
