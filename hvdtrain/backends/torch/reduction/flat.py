"""PyTorch's gradients as parts of few flat tensors; as in ``tensorflow/reduction/flat.py``."""

import sys
from collections.abc import Mapping, Sequence
from itertools import compress, count
from operator import ne

import numpy as np
import torch

from hvdtrain.backends.reduction.shards import divide

_ALIGNED = 16  # elements: each part begins at an address that vector units and fused kernels take
_LINE = 64  # bytes


class Bucket:
    """The gradients of some parameters of one type, side by side in one tensor, to which autograd adds."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = dict(parameters)
        first = next(iter(self.parameters.values()))
        # the tensor, made when it is first used; what stands behind the gradients, for a vector with them
        self.flat = self.room = torch.empty(0, dtype=first.dtype, device=first.device)
        self.parts: list[torch.Tensor] = []  # of the tensor, laid out as the parameters
        self._cast: torch.Tensor | None = None

    @property
    def numbers(self) -> torch.Tensor:
        """The flat tensor; of complex numbers, their real and imaginary parts in its memory."""
        return as_reals(self.flat).view(-1)

    @torch.no_grad()
    def make_room(self, numbers: int) -> None:
        """Have room for a vector. If there was none of its length, the parts are other tensors afterwards."""
        if not self.parts or len(self.room) != numbers:
            self._allocate(numbers)

    @torch.no_grad()
    def lend(self) -> None:
        """Make every part zero, and a parameter's gradient, to which the next backward pass adds."""
        if not self.parts:
            self._allocate(0)
        self._leave_to_others()
        self.flat.zero_()
        for parameter, part in zip(self.parameters.values(), self.parts, strict=True):
            parameter.grad = part

    @torch.no_grad()
    def take_in(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Copy those gradients that are not parts of it, or have been given other memory; zeros for None."""
        if not self.parts:
            self._allocate(0)
        moved = self._moved()
        others = [i for i, part in enumerate(self.parts) if i in moved or gradients[i] is not part]
        if not others:
            return
        if len(others) == len(self.parts):
            self._leave_to_others()
        own = self.flat.untyped_storage().data_ptr()
        given = {i: _copyable(gradient, own) for i in others if (gradient := gradients[i]) is not None}
        for i in self._moved():
            self.parts[i] = self._part(i)
        if given:
            torch._foreach_copy_([self.parts[i] for i in given], list(given.values()))
        for i in others:
            if i not in given:
                self.parts[i].zero_()
        parameters = list(self.parameters.values())
        for i in given:
            if parameters[i].grad is gradients[i]:
                parameters[i].grad = self.parts[i]

    @torch.no_grad()
    def cast(self, kind: torch.dtype, factor: float) -> torch.Tensor:
        """Return the real numbers times a factor as another kind, in memory that the next call overwrites."""
        numbers = self.numbers
        if self._cast is None or self._cast.shape != numbers.shape:
            self._cast = flat_zeros(len(numbers), kind, numbers.device)
        if factor != 1:
            numbers.mul_(factor)
        return self._cast.copy_(numbers)

    def _allocate(self, numbers: int) -> None:
        kind = self.flat.dtype, self.flat.device
        self.flat = self.room = torch.empty(0)  # frees the memory before
        self.parts = []
        self._begins = [0]
        for parameter in self.parameters.values():
            self._begins.append(self._begins[-1] + -(-parameter.numel() // _ALIGNED) * _ALIGNED)
        end = self._begins.pop()
        self.flat = flat_zeros(end + numbers, *kind)
        self.room = self.flat[end:]
        # the strides are those that autograd gives a gradient: the parameter's own if they leave no gap
        empty = (torch.empty_like(p, device="meta") for p in self.parameters.values())
        self._shapes = [(one.shape, one.stride()) for one in empty]
        self.parts = [self._part(i) for i in range(len(self._shapes))]
        self._places = list(map(torch.Tensor.data_ptr, self.parts))
        self._references = self._count_references()

    def _part(self, place: int) -> torch.Tensor:
        # .data: each part counts its own changes, by which a parameter is seen that nothing has reached
        shape, strides = self._shapes[place]
        return self.flat.as_strided(shape, strides, self._begins[place]).data

    def _moved(self) -> set[int]:
        """Return the places of the parts that somebody has given other memory."""
        return set(compress(count(), map(ne, map(torch.Tensor.data_ptr, self.parts), self._places)))

    def _leave_to_others(self) -> None:
        """Take other memory if somebody still has a gradient of an earlier step, or a part other memory."""
        if self._count_references() != self._references or self._moved():
            self._allocate(len(self.room))

    def _count_references(self) -> tuple[int, int]:
        storage = self.flat.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata), sum(map(sys.getrefcount, self.parts))


def make_buckets(parameters: Mapping[str, torch.Tensor], are_several: bool) -> list[Bucket]:
    """Return buckets for parameters, in the order in which a backward pass completes them."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, torch.Tensor]] = {}
    for name, parameter in reversed(list(parameters.items())):
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    return [
        Bucket({name: kind[name] for name in names})
        for kind in kinds.values()
        for names in divide({n: p.numel() * p.element_size() for n, p in kind.items()}, are_several)
    ]


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or of complex numbers the real and imaginary parts in its memory, on one more axis."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def laid_out_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with its numbers where the parameter has its own: fused optimizers count on that."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def flat_zeros(numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a vector of zeros which, on a CPU, begins at a cache line."""
    # numpy requests huge pages, with which MPI reads another process's memory in 0.6 times the time
    if device.type != "cpu":
        return torch.zeros(numbers, dtype=dtype, device=device)
    size = numbers * dtype.itemsize
    room = np.zeros(size + _LINE, np.uint8)
    begin = -room.ctypes.data % _LINE
    return torch.from_numpy(room[begin : begin + size]).view(dtype)


def _copyable(gradient: torch.Tensor, own: int) -> torch.Tensor:
    """Return a gradient that can be copied into a part: dense, and not in the memory at ``own``."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        return gradient.to_dense()
    return gradient.clone() if gradient.untyped_storage().data_ptr() == own else gradient
