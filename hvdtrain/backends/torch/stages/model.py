"""Models of PyTorch divided into blocks and stages; ``tensorflow/stages/model.py`` does so for Keras."""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from hvdtrain.backends.objective.objective import Objective
from hvdtrain.backends.pipeline.checks import (
    check_outputs,
    first_call,
    given_blocks,
    gives_blocks,
    has_no_part,
    uses_another_stage,
    wrong_blocks,
)
from hvdtrain.backends.pipeline.messages import Bytes, Message, pack, unpack
from hvdtrain.backends.torch.probes import state_kept
from hvdtrain.backends.torch.state.model_state import Field, ModelState
from hvdtrain.errors import TaskError
from hvdtrain.models.block import called_in_order, parts_of
from hvdtrain.workers.seeding import random_state_kept


def to_message(value: Any) -> Message:
    """Return nested tensors as a message; they may be on any device.

    Raises:
        TaskError: If there is something that cannot be sent.
    """
    return pack(value, lambda part: isinstance(part, torch.Tensor), _describe)


def from_message(message: Message, device: torch.device) -> Any:
    """Return the nested tensors of a message."""
    return unpack(message, lambda description, buffer: _make(description, buffer).to(device))


def float_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors within a value that can have a gradient, in order."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in float_tensors(part)]


def _describe(tensor: torch.Tensor) -> tuple[Any, Bytes]:
    if tensor.layout != torch.strided:
        raise TaskError(
            f"a block of the model returns a tensor of layout {tensor.layout}, which cannot be passed to the "
            "next stage",
            "Let blocks return dense tensors.",
        )
    tensor = tensor.detach()
    # as it lies in memory: what is computed from it may depend on that in the last bits
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))
    laid_out = tensor.permute(order).contiguous().cpu()
    description = str(tensor.dtype).removeprefix("torch."), list(laid_out.shape), order
    return description, laid_out.reshape(-1).view(torch.uint8).numpy()


def _make(description: Any, buffer: Bytes) -> torch.Tensor:
    kind, shape, order = description
    dtype = getattr(torch, kind)
    flat = torch.from_numpy(np.asarray(buffer)).view(dtype) if len(buffer) else torch.empty(0, dtype=dtype)
    return flat.view(shape).permute([order.index(axis) for axis in range(len(order))])


_PATH = "hvdtrain_path"  # attribute of a tensor of another stage
_REPEATS = 3  # of which the fastest is taken


class StageModel(nn.Module):
    """The blocks of one stage, called one after the other.

    Args:
        blocks: modules, functions or ``Block``.
        whole: the model that they are of, which blocks may ask whether it is in training.
    """

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


class Called:
    """What stands for the whole model when a stage computes the loss: its call computes the stage.

    Args:
        run: is called with what the model is called with.
        signature: that of the model's ``forward``.
        model: the model.
    """

    def __init__(
        self, run: Callable[..., Any], signature: inspect.Signature | None, model: nn.Module
    ) -> None:
        self._run, self._model = run, model
        if signature is not None:
            # how a model is called follows from it
            self.forward = _with_signature(run, signature)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Compute the stage."""
        return self._run(*arguments, **named)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise has_no_part(name, "_model" in self.__dict__ and hasattr(self._model, name))


def call_of(
    objective: Objective, batch: Mapping[str, Any], signature: inspect.Signature | None, model: nn.Module
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which an objective calls the model for a micro-batch.

    Raises:
        TaskError: If it does not call the model.
    """
    return first_call(lambda run: objective(Called(run, signature, model), batch))


def form_of(model: nn.Module) -> inspect.Signature | None:
    """Return the signature of a model's call."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def blocks_of(task: Any, model: nn.Module) -> list[Any]:
    """Return the blocks of a model: what the task gives, or the modules of a sequential one.

    Raises:
        TaskError: If the model cannot be divided.
    """
    if not gives_blocks(task, "torch") and isinstance(model, nn.Sequential):
        return list(model)
    return given_blocks(task, model, "torch", (Sequence, nn.ModuleList, nn.Sequential))


def tensors_of(blocks: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return the parameters and buffers of blocks by their identity."""
    return {
        id(tensor): tensor
        for block in blocks
        for module in parts_of(block, nn.Module)
        for tensor in (*module.parameters(), *module.buffers())
    }


def owners_of(fields: Sequence[Field], stages: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Return for each portable array the stages that have it.

    Raises:
        TaskError: If a stage has a part of one, or no stage has one.
    """
    of_stages = [tensors_of(blocks) for blocks in stages]
    owners = []
    for field in fields:
        held = [[id(tensor) in own for tensor in field.tensors] for own in of_stages]
        having = [stage for stage, has in enumerate(held) if any(has)]
        if not having:
            raise wrong_blocks("torch", f"no block has the model's {'.'.join(field.path.split('/'))}")
        if not all(all(held[stage]) for stage in having):
            raise wrong_blocks("torch", f"a block has only a part of {field.path}")
        owners.append(having)
    return owners


def free_others(whole: ModelState, blocks: Sequence[Any]) -> None:
    """Free the memory of all tensors of a model but those of some blocks; whoever uses them fails."""
    own = tensors_of(blocks)
    for entry in whole.entries:
        if id(entry.tensor) in own:
            continue
        if not entry.tensor.is_meta:
            entry.tensor.requires_grad_(False)
            entry.tensor.data = torch.empty(0, dtype=entry.tensor.dtype)
        vars(entry.tensor)[_PATH] = entry.path
        is_parameter = isinstance(entry.tensor, nn.Parameter)
        entry.tensor.__class__ = _ElsewhereParameter if is_parameter else _Elsewhere


class _Elsewhere(torch.Tensor):
    """A tensor of another stage: whatever is computed with it fails."""

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _used_here(args, kwargs)


class _ElsewhereParameter(nn.Parameter):
    """A parameter of another stage: whatever is computed with it fails."""

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _used_here(args, kwargs)


def _used_here(args: Any, kwargs: Any) -> TaskError:
    leaves = pytree.tree_leaves((args, kwargs))
    paths = (vars(leaf)[_PATH] for leaf in leaves if isinstance(leaf, _Elsewhere | _ElsewhereParameter))
    return uses_another_stage(next(paths, "weights"))


def check_blocks(
    blocks: Sequence[Any], model: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> str:
    """Check that blocks compute what their model does; return what they do otherwise in training, as text.

    Raises:
        TaskError: If they compute something else in evaluation.
    """

    def outputs(training: bool, computed: Callable[..., Any]) -> list[Any]:
        with state_kept(model, torch.device("cpu")), random_state_kept(), torch.no_grad():
            model.train(training)
            found = pytree.tree_leaves(computed(*copies(arguments), **copies(named)))
            return [_array(value) if isinstance(value, torch.Tensor) else value for value in found]

    stage = StageModel(blocks)
    return check_outputs("torch", partial(outputs, computed=model), partial(outputs, computed=stage))


def _array(tensor: torch.Tensor) -> Any:
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def seconds_of(
    blocks: Sequence[Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    """Return how long the forward pass of each block takes for a micro-batch, and both passes."""
    forward, both = [], []
    value: Any = None
    for place, block in enumerate(blocks):
        module, ends = StageModel([block]), []
        for _ in range(_REPEATS):
            given = pytree.tree_map_only(torch.Tensor, _leaf, value)
            begun = time.perf_counter()
            outputs = module(*copies(arguments), **copies(named)) if place == 0 else module(copies(given))
            middle = time.perf_counter()
            of_loss = _with_gradient(outputs)
            wanted = [*_with_gradient(given), *(p for p in module.parameters() if p.requires_grad)]
            if of_loss and wanted:
                torch.autograd.grad(of_loss, wanted, [torch.ones_like(t) for t in of_loss], allow_unused=True)
            ends.append((middle - begun, time.perf_counter() - begun))
        forward.append(min(end for end, _ in ends))
        both.append(min(end for _, end in ends))
        value = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
    return forward, both


def copies(value: Any) -> Any:
    """Return copies of nested tensors, which blocks may change in place: the originals are needed again."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, value)


def _with_gradient(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def bytes_of(blocks: Sequence[Any]) -> list[float]:
    """Return the bytes of each block's parameters, those that several blocks have in each of them."""
    return [
        float(sum(t.numel() * t.element_size() for t in tensors_of([block]).values())) for block in blocks
    ]


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Return a context in which modules are made whose parameters have shapes and no memory.

    A parameter has memory until the module that it belongs to has registered it, so that a model takes as
    much as its largest parameter. Buffers are made as always, and so are parameters that are not plain.
    """
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        own = module._parameters[name]
        if own is not None and not own.is_meta and is_plain(own):
            module._parameters[name] = nn.Parameter(own.to("meta"), requires_grad=own.requires_grad)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has nothing but numbers, not even a hook: another can take its place."""
    has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return type(parameter) is nn.Parameter and not has_hooks and not vars(parameter)


def give_memory(blocks: Sequence[Any], device: torch.device) -> None:
    """Give the parameters of blocks memory that have none; their values are undefined."""
    made: dict[int, nn.Parameter] = {}
    for block in blocks:
        for top in parts_of(block, nn.Module):
            for module in top.modules():
                for name, own in module._parameters.items():
                    if own is not None and own.is_meta:
                        empty = torch.empty_like(own, device=device)
                        made.setdefault(id(own), nn.Parameter(empty, requires_grad=own.requires_grad))
                        module._parameters[name] = made[id(own)]


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _with_signature(run: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def forward(*arguments: Any, **named: Any) -> Any:
        return run(*arguments, **named)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward
