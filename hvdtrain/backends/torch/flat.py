"""PyTorch's gradients as parts of few flat tensors; ``tensorflow/flat.py`` does the same for Keras."""

import sys
from collections.abc import Mapping, Sequence

import torch

from hvdtrain.backends.portable.buckets import divide

_ALIGNED = 16  # elements: each part begins at an address that vector units and fused kernels take


class Bucket:
    """The gradients of some parameters of one type, side by side in one tensor.

    While autograd adds to the parts, no gradient is copied and memory holds each of them once.

    Args:
        parameters: by name.

    Attributes:
        parameters: by name.
        flat: the tensor that is reduced.
        parts: of it, that of each parameter, shaped and laid out as the parameter.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = dict(parameters)
        self.flat = torch.empty(0)
        self.parts: list[torch.Tensor] = []
        self._small: torch.Tensor | None = None
        self._allocate()

    @torch.no_grad()
    def lend(self) -> None:
        """Make every part zero, and a parameter's gradient, to which the next backward pass adds."""
        self._leave_to_others()
        self.flat.zero_()
        for parameter, part in zip(self.parameters.values(), self.parts, strict=True):
            parameter.grad = part

    @torch.no_grad()
    def take_in(self, gradients: Sequence[torch.Tensor]) -> None:
        """Copy those gradients that are not parts of it already."""
        others = [(p, g) for p, g in zip(self.parts, gradients, strict=True) if p is not g]
        if not others:
            return
        if len(others) == len(self.parts):
            self._leave_to_others()
            others = list(zip(self.parts, gradients, strict=True))
        torch._foreach_copy_([part for part, _ in others], [gradient.detach() for _, gradient in others])

    @torch.no_grad()
    def as_fp16(self, factor: float) -> torch.Tensor:
        """Return the flat tensor times a factor as fp16, in memory that the next call overwrites."""
        if self._small is None:
            self._small = torch.empty_like(self.flat, dtype=torch.float16)
        if factor != 1:
            self.flat.mul_(factor)
        return self._small.copy_(self.flat)

    def _allocate(self) -> None:
        first = next(iter(self.parameters.values()))
        ends = [0]
        for parameter in self.parameters.values():
            ends.append(ends[-1] + -(-parameter.numel() // _ALIGNED) * _ALIGNED)
        self.flat = torch.zeros(ends[-1], dtype=first.dtype, device=first.device)
        # .data: each part counts its own changes, by which a parameter is seen that nothing has reached
        self.parts = [
            self.flat.as_strided(p.shape, _strides(p), begin).data
            for begin, p in zip(ends, self.parameters.values(), strict=False)
        ]
        self._references = self._count_references()

    def _leave_to_others(self) -> None:
        """Take other memory if somebody still has a gradient of an earlier step, which would change."""
        if self._count_references() != self._references:
            self._allocate()

    def _count_references(self) -> tuple[int, int]:
        storage = self.flat.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata), sum(map(sys.getrefcount, self.parts))


def make_buckets(parameters: Mapping[str, torch.Tensor], are_several: bool) -> list[Bucket]:
    """Return buckets for parameters, in the order in which a backward pass completes them.

    Args:
        parameters: dense ones, by name, in the order of the model.
        are_several: whether those of one type may have several buckets, of which the first are reduced
            while the backward pass computes the others.
    """
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, torch.Tensor]] = {}
    for name, parameter in reversed(list(parameters.items())):
        kinds.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
    return [
        Bucket({name: kind[name] for name in names})
        for kind in kinds.values()
        for names in divide({n: p.numel() * p.element_size() for n, p in kind.items()}, are_several)
    ]


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that autograd gives a parameter's gradient: its own if they leave no gap."""
    return torch.empty_like(parameter, device="meta").stride()
