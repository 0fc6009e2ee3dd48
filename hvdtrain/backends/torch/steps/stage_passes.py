"""A stage of a split model in PyTorch: blocks, messages and passes; ``tensorflow/`` has the same."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from hvdtrain.backends.pipeline.checks import uses_another_stage
from hvdtrain.backends.pipeline.messages import Bytes, Message, SentTensor
from hvdtrain.backends.pipeline.pipeline import Call, StagePassesBase
from hvdtrain.backends.torch.probes import as_array, state_kept
from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.torch.task_model import autocast
from hvdtrain.models.block import called_in_order, parts_of
from hvdtrain.workers.seeding import random_state_kept

_PATH = "hvdtrain_path"  # attribute of a tensor of another stage


def to_message(value: Any) -> Message:
    """Return nested tensors as a message; they may be on any device."""
    buffers: list[Bytes] = []
    return Message(pytree.tree_map_only(torch.Tensor, partial(_sent, buffers), value), buffers)


def from_message(message: Message, device: torch.device) -> Any:
    """Return the nested tensors of a message."""
    buffers = iter(message.buffers)
    return pytree.tree_map_only(
        SentTensor, lambda sent: _made(sent, next(buffers)).to(device), message.description
    )


def float_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors within a value that can have a gradient, in order."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def _sent(buffers: list[Bytes], tensor: torch.Tensor) -> SentTensor:
    tensor = tensor.detach()
    # as it lies in memory: what is computed from it may depend on that in the last bits
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))
    laid_out = tensor.permute(order).contiguous().cpu()
    buffers.append(laid_out.reshape(-1).view(torch.uint8).numpy())
    return SentTensor(str(tensor.dtype).removeprefix("torch."), list(laid_out.shape), order)


def _made(sent: SentTensor, buffer: Bytes) -> torch.Tensor:
    dtype = getattr(torch, sent.dtype)
    flat = torch.from_numpy(np.asarray(buffer)).view(dtype) if len(buffer) else torch.empty(0, dtype=dtype)
    return flat.view(tuple(sent.shape)).permute([sent.order.index(axis) for axis in range(len(sent.order))])


class StageModel(nn.Module):
    """The blocks of one stage, called one after the other; they may ask whether ``whole`` is in training."""

    def __init__(self, blocks: Sequence[Any], whole: nn.Module | None = None) -> None:
        super().__init__()
        self._calls = list(blocks)
        self.parts = nn.ModuleList(part for block in blocks for part in parts_of(block, nn.Module))
        self._whole = [] if whole is None else [whole]  # in a list, as it is no module of this one

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return the outputs of the last block; the first one is given the arguments."""
        return called_in_order(self._calls, arguments, named)

    def train(self, mode: bool = True) -> "StageModel":
        """Set whether the stage, and the model that it is of, are in training; return the stage."""
        super().train(mode)
        for whole in self._whole:
            whole.train(mode)
        return self


def tensors_of(blocks: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return the parameters and buffers of blocks by their identity."""
    modules = [module for block in blocks for module in parts_of(block, nn.Module)]
    return {id(tensor): tensor for one in modules for tensor in (*one.parameters(), *one.buffers())}


def free_others(whole: ModelState, blocks: Sequence[Any]) -> None:
    """Free the memory of all tensors of a model but those of some blocks; whoever uses them fails."""
    own = tensors_of(blocks)
    for entry in whole.entries:
        if id(entry.tensor) in own:
            continue
        entry.tensor.requires_grad_(False)
        entry.tensor.data = torch.empty(0, dtype=entry.tensor.dtype)
        vars(entry.tensor)[_PATH] = entry.path
        entry.tensor.__class__ = _Elsewhere


class _Elsewhere(nn.Parameter):
    """A parameter or buffer of another stage: whatever is computed with it fails."""

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        leaves = pytree.tree_leaves((args, kwargs))
        paths = (vars(leaf)[_PATH] for leaf in leaves if isinstance(leaf, _Elsewhere))
        raise uses_another_stage(next(paths, "weights"))


def outputs_of(
    model: nn.Module, blocks: Sequence[Any], call: Call, training: bool, in_blocks: bool
) -> list[Any]:
    """Return what a model computes, or its blocks one after the other; nothing else changes."""
    with state_kept(model, torch.device("cpu")), random_state_kept(), torch.no_grad():
        model.train(training)
        arguments, named = copies(call)
        found = pytree.tree_leaves((StageModel(blocks) if in_blocks else model)(*arguments, **named))
        return [as_array(value) if isinstance(value, torch.Tensor) else value for value in found]


def copies(value: Any) -> Any:
    """Return copies of nested tensors, which blocks may change in place: the originals are needed again."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, value)


class StagePasses(StagePassesBase):
    """What a worker computes of the micro-batches of a step."""

    sent, weighted_sums = staticmethod(to_message), staticmethod(torch.mv)

    def received(self, message: Message) -> Any:
        """Return the tensors of a message."""
        return from_message(message, self._computation.device)

    def begin(self, batch: Any, training: bool) -> None:
        """Begin a step, or the evaluation of a batch."""
        super().begin(batch, training)
        self._computation.enter_mode(training)

    def forward(self, place: int, call: Call) -> Any:
        """Return the outputs of a call, and keep them with what the stage was given."""
        leaves = self._leaves(call)
        outputs = self._computed(place, call)
        self._kept[place] = leaves, float_tensors(outputs)
        return outputs

    def backward(self, place: int, gradients: Any) -> list[torch.Tensor | None]:
        """Add a micro-batch's part to the gradients; return the gradients of what the stage was given."""
        leaves, outputs = self._kept.pop(place)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
        run = partial(torch.autograd.backward, [o for o, _ in pairs], [g for _, g in pairs])
        self._update.differentiate(run if pairs else lambda: None)
        return [leaf.grad for leaf in leaves]

    def compute_loss(self, place: int, call: Call) -> list[torch.Tensor | None]:
        """Do both passes of a micro-batch in the last stage."""
        leaves = self._leaves(call)
        losses, own, gradient_weights = self._values(place, call)
        self._update.backward(losses, gradient_weights if own is None else gradient_weights * own)
        return [leaf.grad for leaf in leaves]

    @torch.no_grad()
    def evaluate(self, place: int, call: Call) -> Any:
        """Return the outputs of a call; in the last stage, take in the metrics."""
        if not self._layout.is_last_stage:
            return self._computed(place, call)
        self._values(place, call)
        return None

    def taken(self) -> Any:
        """Return what the last micro-batch gave to metrics of a whole evaluation, in the last stage."""
        return self._computation.evaluation.take()

    def _computed(self, place: int, call: Call) -> Any:
        """Return the outputs of the stage."""
        computation = self._computation
        computation.batch_norm.weights = self.counted(place)[1]
        computation.seed_step(self._batch.step, place)
        with autocast(computation.precision, computation.device):
            return computation.model(*copies(call[0]), **copies(call[1]))

    def _values(self, place: int, call: Call) -> tuple[Any, Any, torch.Tensor]:
        """Take in the values of a micro-batch in the last stage; return losses and what each counts for."""
        micro_batch, weights, gradient_weights = self.counted(place)
        self._called.run = lambda *_, **__: self._computed(place, call)
        with autocast(self._computation.precision, self._computation.device):
            losses, metrics = self._objective(self._called, micro_batch)
        losses, own, rows = self._computation.values({"loss": losses, **metrics}, len(weights))
        self.forms[self._computation.is_training] = self._computation.names, self._computation.weighted
        self._add(rows.detach(), weights)
        return losses, own, gradient_weights

    def _leaves(self, call: Call) -> list[torch.Tensor]:
        """Return the tensors that a stage was given whose gradients the stage before needs."""
        given = [] if self._layout.is_first_stage else float_tensors(list(call[0]))
        return [tensor.requires_grad_() for tensor in given]
