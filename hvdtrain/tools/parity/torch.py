"""Looking into a model of PyTorch; ``tensorflow/probe.py`` does the same for Keras."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.backends.base import Backend, PortableState
from hvdtrain.backends.objective.counting import Weighted
from hvdtrain.backends.objective.objective import make_objective
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.torch.dry_run import state_kept
from hvdtrain.backends.torch.objective.losses import NAMED
from hvdtrain.backends.torch.precision import autocast
from hvdtrain.backends.torch.state.model_state import Field, ModelState
from hvdtrain.config import Config
from hvdtrain.parity.paths import layer_paths
from hvdtrain.parity.torch.calls import Recorder, to_array
from hvdtrain.parity.torch.settings import optimizer_settings, stop_dropout
from hvdtrain.tools.parity.observation import ForwardPass

Arrays = Mapping[str, NDArray[Any]]


@contextmanager
def in_fp64() -> Iterator[None]:
    """Return a context in which models are made that compute in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_probe(backend: Backend, task: Any, config: Config) -> "TorchProbe":
    """Return what looks into the backend's model."""
    return TorchProbe(backend, task, config)


class TorchProbe:
    """Looks into a model that the backend has built.

    Args:
        backend: the backend.
        task: the task.
        config: the config.
    """

    def __init__(self, backend: Backend, task: Any, config: Config) -> None:
        self._backend: Any = backend
        self._model: torch.nn.Module = backend.model
        self._device = next(self._model.parameters()).device
        self._precision = config.precision
        self._objective = make_objective(task, "torch", NAMED)
        self._train_objective = make_objective(task, "torch", NAMED, config.label_smoothing)
        renaming = Renaming(task, "torch")
        tensors = ModelState(self._model, renaming)
        self._fields = list(tensors.trainable_fields())
        self._paths = layer_paths(
            (
                (name.replace(".", "/"), id(module))
                for name, module in self._model.named_modules(remove_duplicate=False)
            ),
            ((field.own, field.path) for field in tensors.fields),
            renaming,
        )

    def forward(self, arrays: Arrays) -> tuple[ForwardPass, ForwardPass]:
        """Return two forward passes in evaluation with the same samples."""
        with state_kept(self._model, self._device):
            self._model.eval()
            return self._forward(arrays), self._forward(arrays)

    def stop_dropout(self) -> list[float]:
        """Let dropout layers drop nothing from now on; return the rates that they had."""
        return stop_dropout(self._model)

    def losses_in_training(self, arrays: Arrays, weights: NDArray[Any]) -> tuple[float, float]:
        """Return the mean losses of two passes in training, which draw random numbers one after the other."""
        with state_kept(self._model, self._device), torch.no_grad():
            self._model.train()
            before = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
            first = float(self._mean_loss(arrays, weights))
            for buffer, value in before:  # such as moving statistics
                buffer.copy_(value)
            return first, float(self._mean_loss(arrays, weights))

    def gradients(self, arrays: Arrays, weights: NDArray[Any]) -> tuple[float, PortableState]:
        """Return the mean loss in training and its gradient by portable names."""
        tensors = [tensor for field in self._fields for tensor in field.tensors]
        parameters = list({id(tensor): tensor for tensor in tensors}.values())
        with state_kept(self._model, self._device):
            self._model.train()
            loss = self._mean_loss(arrays, weights)
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        by_tensor = {
            id(tensor): torch.zeros_like(tensor) if gradient is None else gradient.to_dense()
            for tensor, gradient in zip(parameters, found, strict=True)
        }
        return float(loss.detach()), {field.name: _gradient(field, by_tensor) for field in self._fields}

    def optimizer(self) -> dict[str, Any]:
        """Return what the optimizer was made with, under names that both frameworks share."""
        return optimizer_settings(self._backend.optimizers[0])

    def _forward(self, arrays: Arrays) -> ForwardPass:
        # with gradients: without, attention takes a way of its own that training does not take
        with Recorder(self._model, self._paths) as recorder, autocast(self._precision, self._device):
            losses, _ = self._objective(self._model, self._on_device(arrays))
        values = losses.values if isinstance(losses, Weighted) else losses
        calls = tuple(call for call in recorder.calls if call.path)
        return ForwardPass(
            calls,
            next(iter(recorder.outputs), None),
            np.atleast_1d(to_array(values)),
            recorder.outputs[1:],
            recorder.narrow,
        )

    def _mean_loss(self, arrays: Arrays, weights: NDArray[Any]) -> torch.Tensor:
        with autocast(self._precision, self._device):
            losses, _ = self._train_objective(self._model, self._on_device(arrays))
        own: torch.Tensor | None = None
        values: torch.Tensor = losses
        if isinstance(losses, Weighted):
            values, own = losses.values, torch.as_tensor(losses.weights).detach()
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        values = values.to(wide)
        if values.dim() == 0:
            return values
        counted = torch.as_tensor(weights, device=self._device).to(wide)
        counted = counted if own is None else counted * own.to(wide)
        return (values * counted).sum() / counted.sum()

    def _on_device(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.array(array)).to(self._device) for name, array in arrays.items()}


def _gradient(field: Field, gradients: Mapping[int, torch.Tensor]) -> NDArray[Any]:
    """Return the gradient of one portable array."""
    layout = field.layout.of_slots or field.layout
    parts = [to_array(view) for view in field.views([gradients[id(t)] for t in field.tensors])]
    return np.array(layout.to_portable(parts))
