"""Half precision in PyTorch: autocast, and a loss scale for fp16."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hvdtrain.backends.options import GROWTH_INTERVAL, INITIAL_SCALE, LOWEST_SCALE, LossScaleBase
from hvdtrain.backends.workers import Sized

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
    half: AbstractContextManager[Any] = torch.autocast(
        device.type, dtype=_HALVES[precision], cache_enabled=cache
    )
    return half


def cast_outputs_to_fp32(model: torch.nn.Module, precision: str) -> None:
    """Cast the model's outputs to fp32, so that losses and metrics are computed in it."""
    if precision == "fp32":
        return
    is_called = type(model).forward is not torch.nn.Module.forward
    for module in [model] if is_called else model.children():
        module.register_forward_hook(
            lambda _module, _inputs, outputs: pytree.tree_map(_cast_to_fp32, outputs)
        )


def _cast_to_fp32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in _HALVES.values()
    return value.float() if is_half else value


class LossScale(LossScaleBase):
    """Keeps the gradients of fp16 in its range: they are scaled up before and down after."""

    def __init__(
        self, workers: Sized, initial: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        super().__init__(workers, growth_interval)
        self.value = initial
        self.skipped = 0
        self.is_exhausted = False
        self._steps_since_change = 0

    def to_broadcast(self) -> torch.Tensor:
        """Return what differs from step to step, for another worker to continue from."""
        return torch.tensor([self.value, self._steps_since_change, self.skipped], dtype=torch.float64)

    def follow(self, found: torch.Tensor) -> None:
        """Continue from what ``to_broadcast`` returned."""
        self.value, steps, skipped = found.tolist()
        self._steps_since_change, self.skipped = round(steps), round(skipped)

    def unscale(self, gradients: Sequence[torch.Tensor], agree: Callable[[bool], bool] = bool) -> bool:
        """Divide reduced gradients by the factor, in place, and adapt it; return whether they are finite."""
        largest = torch.stack([torch.linalg.vector_norm(g, float("inf")) for g in gradients])
        is_finite = agree(bool(torch.isfinite(largest).all()))
        if is_finite:
            for gradient in gradients:
                gradient.div_(self.factor)
        self._adapt(is_finite)
        return is_finite

    def _adapt(self, is_finite: bool) -> None:
        self.is_exhausted = not is_finite and self.value <= LOWEST_SCALE
        self._steps_since_change += 1
        if not is_finite:
            self.skipped += 1
            self.value, self._steps_since_change = max(LOWEST_SCALE, self.value / 2), 0
        elif self._steps_since_change >= self._growth_interval:
            self.value, self._steps_since_change = self.value * 2, 0
