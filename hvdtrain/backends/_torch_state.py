"""PyTorch models and optimizers as portable state: names and layouts from module types.

``_keras_state`` does the same for Keras; the rules stand in ``base``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[np.generic]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMS = (*_BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

_NORM_ROLES = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
# PyTorch's optimizer slots, by the names that Keras twins use
_SLOTS = {"momentum_buffer": "momentum", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}


def _same(array: Array) -> Array:
    return array


def _transposed(array: Array) -> Array:
    return array.T


def _kernel_first(array: Array) -> Array:
    """(out, in, ..spatial) to (..spatial, in, out)."""
    return np.moveaxis(array, (1, 0), (-2, -1))


def _kernel_last(array: Array) -> Array:
    """(..spatial, in, out) to (out, in, ..spatial)."""
    return np.moveaxis(array, (-2, -1), (1, 0))


@dataclass(frozen=True)
class Entry:
    """One tensor of a model under its portable name.

    Attributes:
        path: portable module path and role, such as "conv1/kernel".
        tensor: the parameter or buffer.
        to_portable: its layout to the portable one.
        from_portable: and back.
        trainable: whether it is a parameter that training changes.
    """

    path: str
    tensor: torch.Tensor
    to_portable: Callable[[Array], Array] = _same
    from_portable: Callable[[Array], Array] = _same
    trainable: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The portable array's shape."""
        return self.to_portable(np.broadcast_to(np.float32(0), self.tensor.shape)).shape

    def read(self) -> Array:
        """Copy the tensor into a portable array."""
        return np.array(self.to_portable(self.tensor.detach().cpu().numpy()), order="C")

    def write(self, array: Array) -> None:
        """Copy a portable array into the tensor."""
        with torch.no_grad():
            self.tensor.copy_(torch.from_numpy(np.ascontiguousarray(self.from_portable(array))))


def entries(model: nn.Module) -> list[Entry]:
    """Give every parameter and persistent buffer of a model, each tensor once."""
    seen: set[int] = set()
    result = []
    for module_path, module in model.named_modules():
        for name, tensor in _own_tensors(module):
            if id(tensor) in seen or (name == "num_batches_tracked" and isinstance(module, _BATCH_NORMS)):
                continue
            seen.add(id(tensor))
            result.append(_entry(module_path.replace(".", "/"), module, name, tensor))
    return result


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    for name, tensor in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, tensor


def _entry(module_path: str, module: nn.Module, name: str, tensor: torch.Tensor) -> Entry:
    role, to_portable, from_portable = name, _same, _same
    if isinstance(module, nn.Linear) and name == "weight":
        role, to_portable, from_portable = "kernel", _transposed, _transposed
    elif isinstance(module, _CONVOLUTIONS) and name == "weight":
        role, to_portable, from_portable = "kernel", _kernel_first, _kernel_last
    elif isinstance(module, nn.Embedding) and name == "weight":
        role = "embeddings"
    elif isinstance(module, _NORMS):
        role = _NORM_ROLES.get(name, name)
    path = f"{module_path}/{role}" if module_path else role
    trainable = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    return Entry(path, tensor, to_portable, from_portable, trainable)


def slot_entries(optimizer: torch.optim.Optimizer, model_entries: list[Entry]) -> list[Entry]:
    """Give the optimizer's slots as entries: those shaped as their parameter share its layout.

    Counts of steps are left out; ``step_counts`` gives them.
    """
    result = []
    for entry in model_entries:
        for key, tensor in optimizer.state.get(entry.tensor, {}).items():
            if not isinstance(tensor, torch.Tensor) or key == "step":
                continue
            path = f"{_SLOTS.get(key, key)}/{entry.path}"
            if tensor.shape == entry.tensor.shape:
                result.append(Entry(path, tensor, entry.to_portable, entry.from_portable))
            else:
                result.append(Entry(path, tensor))
    return result


def step_counts(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Give the optimizer's counts of steps, one per parameter; all are equal."""
    return [state["step"] for state in optimizer.state.values() if "step" in state]
