"""Plain training loops: one process, whole batches, as the documentation of each framework writes them.

They call the task's own model and loss, and use nothing of how hvdtrain does a step. ``torch.py`` and
``tensorflow.py`` have the loop of each framework.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from hvdtrain.backends.objective.model_call import ModelCall, nested_batch
from hvdtrain.backends.objective.objective import make_objective
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.records import ModelInfo, PortableState
from hvdtrain.config import Config
from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS

Samples = Mapping[str, np.ndarray[Any, Any]]
_OWN_NAMES = ("mse", "mae", "binary_cross_entropy", "cross_entropy")


def of_framework(framework: str) -> Any:
    """Return the module of this folder that looks into a framework's models."""
    return import_module(f"hvdtrain.tools.parity.{FRAMEWORKS[framework].module.split('.')[-2]}")


class PlainLoop:
    """Trains a task's model, which the backend has built, on whole batches."""

    framework: str
    model: Any
    state: Any  # the model's state by portable names
    table: Mapping[str, Any]  # the named losses of hvdtrain
    total: Callable[[Any], Any]  # the sum of a tensor
    optimizer: Any
    # what subclasses do: take a step with a batch, the given one from 0, with a learning rate, and return its
    # loss; return the losses of samples, or their mean, and weights, without gradients; seed the framework
    step: Callable[[Samples, int, float], float]
    losses: Callable[[Samples, bool], tuple[Any, Any]]
    seed: Callable[[int], None]
    _open: Callable[[], None]
    _make_optimizer: Callable[[], None]
    _tensors: Callable[[Samples], dict[str, Any]]
    _like: Callable[[Any, Any], Any]
    _named: Callable[[str, Any, Any], Any]

    def __init__(self, task: Any, config: Config, backend: Any, info: ModelInfo) -> None:
        self.task, self.config, self.backend = task, config, backend
        self.own_base = info.own_rates.base if info.own_rates else None
        self._own = getattr(task, f"{self.framework}_loss", None)
        self._loss = getattr(task, "loss", None)
        self._call = ModelCall(self.framework)
        self.renaming = Renaming(task, self.framework)
        self.noise = 0.0  # of gradients, relative to the largest
        if hasattr(task, f"{self.framework}_step"):
            raise TaskError("the task has its own training step")
        if not hasattr(task, f"{self.framework}_optimizer") and config.optimizer not in ("sgd", "adamw"):
            raise TaskError(f"{config.optimizer} is hvdtrain's own optimizer")
        self._open()
        self.start = self.arrays()
        self.trained = [one.name for one in self.state.trainable_fields()]

    def arrays(self) -> PortableState:
        """Return copies of the model's arrays."""
        return {one.name: np.array(one.read()) for one in self.state.fields}

    def restart(self, start: PortableState) -> None:
        """Begin anew, from these arrays."""
        for one in self.state.fields:
            one.write(start)
        self._make_optimizer()

    def _values(self, model: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
        """Return losses and weights by the task's loss; for a named one by the framework's function."""
        if self._own is not None:
            losses = getattr(self._own, "call", self._own)(model, nested_batch(batch))[0]
        elif callable(self._loss) and type(self._loss).__name__ in ("function", "method"):
            losses = self._loss(*self._call(model, batch))
        elif self._is_plain(batch):
            outputs, given = self._call(model, batch)
            losses = self._named(str(self._loss), outputs, given["targets"])
        else:
            smoothing = self.config.label_smoothing if training else 0.0
            losses = make_objective(self.task, self.framework, self.table, smoothing)(model, batch)[0]
        return self._pair(losses, batch.get("weights"))

    def _pair(self, losses: Any, weights: Any = None) -> tuple[Any, Any]:
        """Return losses and their weights, which may be integers, in one type."""
        values, weights = losses if isinstance(losses, tuple) else (losses, weights)
        return values, None if weights is None else self._like(weights, values)

    def _mean(self, values: Any, weights: Any) -> Any:
        """Return the mean of losses over samples, by their weights if they have any."""
        if not len(values.shape):
            return values
        total = type(self).total
        return total(values) / len(values) if weights is None else total(values * weights) / total(weights)

    def _is_plain(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the loss is what the framework's function of this name computes."""
        special = [one for one in ("class_weights", "class_axis", "ignore_index") if hasattr(self.task, one)]
        targets = batch.get("targets")
        return (
            self._loss in _OWN_NAMES
            and not (special or "weights" in batch or self.config.label_smoothing)
            and (self._loss != "cross_entropy" or (targets is not None and len(targets.shape) == 1))
        )


def mean_of(losses: tuple[Any, Any]) -> tuple[float, float]:
    """Return the mean of what ``PlainLoop.losses`` gives, and the weight of the batch."""
    values, weights = losses
    if weights is None and not values.shape:
        return float(values), float("nan")
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    total = float(weights.sum())
    return float((values * weights).sum() / (total or 1.0)), total


def steps_of(session: Any, steps: int) -> list[tuple[dict[str, Any], float]]:
    """Return the samples of each step of a run, and its learning rate."""
    plan, found = session.plan(), list[tuple[dict[str, Any], float]]()
    with session.data.train_feed(plan, session.state.progress) as feed:
        for batch in feed:
            rate = session.learning_rate(plan)
            found.append((rows_of(batch), rate))
            session.advance(plan, rate, batch.total_weight)
            if len(found) == steps:
                break
    return found


def rows_of(batch: Any) -> dict[str, Any]:
    """Return the samples of a batch without padding."""
    real = batch.weights.reshape(-1) > 0
    return {name: array.reshape(-1, *array.shape[2:])[real] for name, array in batch.arrays.items()}
