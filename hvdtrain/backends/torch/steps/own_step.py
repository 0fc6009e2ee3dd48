"""A task's own training step in PyTorch: the optimizers that it is given, and how it is run.

``tensorflow/own_step.py`` does the same for Keras; the rules are in ``backends/own_step.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.optimizers import check_named_optimizers, check_owners, combined_rates, in_one_array
from hvdtrain.backends.own_step import (
    Optimizers,
    Step,
    StepPart,
    accumulated,
)
from hvdtrain.backends.records import OwnRates
from hvdtrain.backends.torch.state.ema import ExponentialMovingAverage
from hvdtrain.backends.torch.state.model_state import Entry, ModelState
from hvdtrain.backends.torch.steps.optimizers import take_own_rates
from hvdtrain.backends.torch.steps.step_optimizer import Calls, StepOptimizer
from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers


def make_optimizers(
    task: Any, model: torch.nn.Module, tensors: ModelState
) -> dict[str, torch.optim.Optimizer]:
    """Make the optimizers of a task that names several.

    Args:
        task: the task, which has ``torch_optimizers``.
        model: the model.
        tensors: the model's tensors.

    Raises:
        TaskError: If it gives something else, or not exactly one of them trains each trainable parameter.
    """
    method = "torch_optimizers"
    by_name = check_named_optimizers(task.torch_optimizers(model), torch.optim.Optimizer, method)
    known = {id(entry.tensor) for entry in tensors.entries}
    names = {id(entry.tensor): entry.path for entry in tensors.entries if entry.trainable}
    owned: dict[str, list[str]] = {}
    foreign: dict[str, int] = {}
    owners: dict[int, str] = {}
    for name, optimizer in by_name.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owned[name] = [names[id(p)] for p in parameters if id(p) in names]
        foreign[name] = sum(id(p) not in known for p in parameters)
        owners |= dict.fromkeys(map(id, parameters), name)
    check_owners(method, list(names.values()), owned, foreign)
    for field in tensors.trainable_fields():
        if len({owners.get(id(tensor)) for tensor in field.tensors}) > 1:
            raise in_one_array(field.name)
    return by_name


def take_rates(optimizers: Mapping[str, torch.optim.Optimizer]) -> OwnRates:
    """Take the learning rates of a task's optimizers as their own; the largest of all is the base.

    Raises:
        TaskError: as ``take_own_rates``.
    """
    rates, relative = combined_rates({name: take_own_rates(one) for name, one in optimizers.items()})
    for name, optimizer in optimizers.items():
        if relative[name] != 1.0:
            for group in optimizer.param_groups:
                group["lr_scale"] = group.get("lr_scale", 1.0) * relative[name]
    return rates


class OwnStep:
    """A task's own training step.

    Args:
        step: what the task does in a step.
        optimizers: its optimizers, by name.
        trainable: the trainable parameters.
        config: the config.
        ema: the moving average of the weights.
        workers: the job's workers.
    """

    def __init__(
        self,
        step: Step,
        optimizers: Mapping[str, torch.optim.Optimizer],
        trainable: Sequence[Entry],
        config: Config,
        ema: ExponentialMovingAverage,
        *,
        workers: Workers,
    ) -> None:
        self._step = step
        self._ema = ema
        self._workers = workers
        self._is_running = False
        self._calls = Calls(list(optimizers), workers)
        for entry in trainable:  # before the hooks of reducers
            entry.tensor.register_post_accumulate_grad_hook(self._refuse)  # type: ignore[no-untyped-call]
        self._optimizers: dict[str, StepOptimizer] = {}
        for name, optimizer in optimizers.items():
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            entries = [entry for entry in trainable if id(entry.tensor) in own]
            self._optimizers[name] = StepOptimizer(
                name, optimizer, entries, config, self._calls, workers=workers
            )
        self._given = Optimizers(self._optimizers)

    def begin(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self._is_running = False
        for optimizer in self._optimizers.values():
            optimizer.forget()

    def run(self, model: Any, batch: Mapping[str, Any], number: int, samples: StepPart) -> dict[str, Any]:
        """Collective. Do the task's step and return its loss, the first, and its metrics by name.

        Args:
            model: the model.
            batch: the samples, with flat names.
            number: of the step, counted from 0.
            samples: their weights, and the learning rate.
        """
        self._given.step = number
        self._calls.begin()
        for optimizer in self._optimizers.values():
            optimizer.begin(samples)
        self._is_running = True
        try:
            losses, metrics = self._step(model, batch, self._given)
        finally:
            self._is_running = False
            for optimizer in self._optimizers.values():
                optimizer.begin(None)
        return {"loss": losses, **metrics}

    def unused(self) -> list[str]:
        """Return the parameters that the losses given to their optimizer did not reach in the last step."""
        return [f"model/{path}" for one in self._optimizers.values() for path in sorted(one.unused)]

    def not_applied(self) -> list[str]:
        """Return the optimizers that took no step in the last step."""
        return [name for name, optimizer in self._optimizers.items() if not optimizer.is_applied]

    def reduce(self, vector: torch.Tensor, names: Sequence[str], weighted: Sequence[str]) -> torch.Tensor:
        """Collective. Sum the step's vector over workers and return it.

        Args:
            vector: the sums of the loss and the metrics, and what follows them.
            names: "loss" and the metrics.
            weighted: those of them that are Weighted.
        """
        if self._workers.size > 1:
            check = self._calls.announce_end(names, weighted)
            handle = hvd.allreduce_async_(vector, op=hvd.Sum, name="hvdtrain.metrics")
            check()
            hvd.synchronize(handle)
        return vector

    def ema(self, step: int) -> None:
        """Take the weights into their moving average.

        Args:
            step: steps done, this one included.
        """
        self._ema.update(self._ema.share(step))

    def _refuse(self, parameter: torch.Tensor) -> None:
        """Refuse gradients that a backward pass of the task's own has added to a parameter; a hook."""
        if self._is_running:
            parameter.grad = None
            raise accumulated("backward()")
