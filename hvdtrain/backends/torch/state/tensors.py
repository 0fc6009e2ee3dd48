"""The values of PyTorch's tensors of all layouts: copies of them on the host, and other values for them."""

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
        # numpy asks the system for huge pages, and most of a copy's time goes into new pages
        room = torch.from_numpy(np.empty(tensor.shape, as_array(tensor).dtype))
        return room.copy_(tensor)
    # only a copy into pinned memory lets the host continue; strides are kept, so that none are changed here
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def as_kept(tensor: torch.Tensor, is_buffer: bool = False) -> torch.Tensor:
    """Return a copy in the host's memory; PyTorch makes it when one of the two changes, if it can.

    Of a buffer it is made at once: PyTorch could not resize one of the two, as observers of quantisation do.
    """
    if tensor.device.type == "cpu" and not is_buffer:
        with suppress(RuntimeError):  # if something else, such as numpy, has allocated the memory
            return torch._lazy_clone(tensor.detach())
    return tensor.detach().cpu().clone()


def address_of(tensor: torch.Tensor) -> int:
    """Return where the values lie; of a sparse tensor, a number of its own."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]
