"""Tensors of a model and of its optimizer: values, parts, and slots that an optimizer makes late."""

import copy
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.errors import TaskError

# the mapping by which a module holds a tensor, its name there, the tensor, and a copy of it
KeptTensor = tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]

# kinds of numbers that numpy has; others (bfloat16, 8-bit floats) travel as float32, which has their values
_NUMPY_KINDS = {
    *(torch.float64, torch.float32, torch.float16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}
# the methods that give the tensors of which a sparse one consists
PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor's values as an array; one on the CPU shares its memory."""
    tensor = tensor.detach().cpu()
    if tensor.dtype not in _NUMPY_KINDS:
        tensor = tensor.to(torch.complex64 if tensor.is_complex() else torch.float32)
    array: NDArray[Any] = tensor.resolve_conj().resolve_neg().numpy()
    return array


def strided_parts(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the dense tensors with a tensor's values, and what follows its name: itself if it is dense."""
    methods = PARTS.get(tensor.layout, ())
    detached = tensor.detach() if methods else tensor
    return [(f".{name.strip('_')}", getattr(detached, name)()) for name in methods] or [("", tensor)]


def set_values(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor other values, and their shape; its strides stay where the shape does."""
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        if tensor.layout is not torch.strided:
            for (_, part), (_, new) in zip(strided_parts(tensor), strided_parts(value), strict=True):
                set_values(part, new)
        elif tensor.shape != value.shape or tensor.dtype != value.dtype:
            tensor.data = value.to(tensor.device, copy=True)
        else:
            for axis, stride in enumerate(tensor.stride()):
                if stride == 0 and tensor.shape[axis]:  # of an expanded tensor
                    tensor, value = tensor.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
            tensor.copy_(value)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on its way to the host's memory: from a GPU, it is there when the device has done it."""
    if not tensor.is_cuda:
        if tensor.dtype not in _NUMPY_KINDS or not tensor.is_contiguous():
            return tensor.clone()
        # numpy requests huge pages from the system, and most of a copy's time goes into new pages
        return torch.from_numpy(np.empty(tensor.shape, as_array(tensor).dtype)).copy_(tensor)
    # only a copy into pinned memory lets the host continue; strides are kept, so that none are changed here
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def as_kept(tensor: torch.Tensor, is_buffer: bool = False) -> torch.Tensor:
    """Return a copy in the host's memory; PyTorch makes it when one of the two changes, if it can."""
    # PyTorch could not resize a buffer and such a copy, as observers of quantisation do
    if tensor.device.type == "cpu" and not is_buffer:
        with suppress(RuntimeError):  # if something else, such as numpy, has allocated the memory
            return torch._lazy_clone(tensor.detach())
    return tensor.detach().cpu().clone()


def address_of(tensor: torch.Tensor) -> int:
    """Return where the values lie; of a sparse tensor, a number of its own."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]


def fill_slots(optimizer: torch.optim.Optimizer) -> None:
    """Make the slots of hvdtrain's optimizers as zeros, so that there is a state to broadcast."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if "betas" in group:
                optimizer.state[parameter] = {
                    # where the operation that computes with it runs
                    "step": torch.zeros((), device=parameter.device if group.get("fused") else "cpu"),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            elif group["momentum"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def make_slots(optimizer: torch.optim.Optimizer, chosen: Collection[int] | None = None) -> None:
    """Let an optimizer make its slots, by a step with zero gradients that changes nothing else."""
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    options = copy.deepcopy(options)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [(p, p.detach().clone(), p.grad) for p in parameters]
    for p in parameters:
        is_chosen = p.requires_grad if chosen is None else id(p) in chosen
        p.grad = torch.zeros_like(p) if is_chosen else None
        if isinstance(optimizer, torch.optim.SparseAdam) and p.grad is not None:
            p.grad = p.grad.to_sparse()
    for group in optimizer.param_groups:  # in some optimizers, it would be in the slots
        if isinstance(group.get("weight_decay"), float | int):
            group["weight_decay"] = 0.0
    try:
        optimizer.step()
    except Exception as error:
        name = type(optimizer).__name__
        raise TaskError(f"the slots of {name} cannot be made: {error}") from error
    finally:
        for p, value, gradient in before:
            p.detach().copy_(value)
            p.grad = gradient
        for group, before_step in zip(optimizer.param_groups, options, strict=True):
            group.update(before_step)
