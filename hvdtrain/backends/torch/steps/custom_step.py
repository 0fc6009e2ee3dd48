"""A task's own training step; ``tensorflow/`` has the same, and ``backends/custom_step.py`` the rules."""

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from numpy.typing import NDArray

from hvdtrain.backends.custom_step import (
    CustomStepRules,
    Optimizers,
    StepPart,
    accumulated,
    own_step_of,
)
from hvdtrain.backends.step_metrics import PendingVector
from hvdtrain.backends.torch.batches import TorchBatch, TorchPending
from hvdtrain.backends.torch.precision import autocast
from hvdtrain.backends.torch.probes import values_of_first
from hvdtrain.backends.torch.steps.parts import Parts
from hvdtrain.backends.torch.steps.plain_step import PlainStep
from hvdtrain.backends.torch.steps.step_optimizer import Calls, StepOptimizer


class CustomStep(CustomStepRules, PlainStep):
    """A task's own training step: it calls the model and its optimizers as it likes."""

    forecasts_memory = False

    def attach(self, parts: Parts) -> None:
        """Take the parts of the step. Local: no collective."""
        self.parts = parts
        self._step: Any = own_step_of(parts.task, parts.config)
        self._calls = Calls(list(parts.optimizers), self.workers)
        for entry in parts.trainable:  # before the hooks of reducers
            entry.tensor.register_post_accumulate_grad_hook(self._refuse)  # type: ignore[no-untyped-call]
        self._optimizers: dict[str, StepOptimizer] = {}
        for name, optimizer in parts.optimizers.items():
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            entries = [entry for entry in parts.trainable if id(entry.tensor) in own]
            self._optimizers[name] = StepOptimizer(
                name, optimizer, entries, parts.config, self._calls, workers=self.workers
            )
        self._given = Optimizers(self._optimizers)

    def changed_early(self) -> list[Any]:
        """Return the optimizers whose updates a step does before its last reduction."""
        return list(self.parts.optimizers.values())

    def train(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Collective. Do a step."""
        computation = self.computation
        micro_batch, weights, gradient_weights = batch.counted(0)
        samples = StepPart(weights, gradient_weights, batch.total_weight, learning_rate)
        rows = self._rows(micro_batch, batch.step, samples)
        unused = [f"model/{path}" for one in self._optimizers.values() for path in sorted(one.unused)]
        vector = torch.cat((torch.mv(rows, weights), computation.numbers(unused, signals)))
        if self.workers.size > 1:
            check = self._calls.announce_end(computation.names, computation.weighted)
            handle = hvd.allreduce_async_(vector, op=hvd.Sum, name="hvdtrain.metrics")
            check()
            hvd.synchronize(handle)
        self.parts.ema.update(self.parts.ema.share(batch.step + 1))
        self.parts.trained_set.look()
        return TorchPending(computation.names, vector, batch.total_weight, unused, computation.weighted)

    def dry_run(self, batch: TorchBatch, training: bool) -> dict[str, NDArray[Any]]:
        """Collective. Return the loss and the metrics of a batch's first micro-batch, by name."""

        def rows_of(micro_batch: Any, weights: torch.Tensor, gradient_weights: torch.Tensor) -> torch.Tensor:
            samples = StepPart(weights, gradient_weights, batch.total_weight, None)
            return self._rows(micro_batch, batch.step, samples)

        return values_of_first(self.computation, batch, training, rows_of)

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self._is_running = False
        for optimizer in self._optimizers.values():
            optimizer.forget()

    def _rows(self, micro_batch: dict[str, torch.Tensor], number: int, samples: StepPart) -> torch.Tensor:
        """Collective. Do the task's step, or a dry run of it, and return the rows of its values."""
        computation = self.computation
        computation.batch_norm.weights = samples.weights
        # a cached cast of a weight would not follow the weight when it is updated within the step
        among = computation.gathering.among(self.near, samples.weights)
        with (
            autocast(computation.precision, computation.device, cache=False),
            among,
            self._running(number, samples) as optimizers,
        ):
            losses, metrics = self._step(computation.model, micro_batch, optimizers)
        return computation.values({"loss": losses, **metrics}, len(samples.weights)).rows

    def _refuse(self, parameter: torch.Tensor) -> None:
        """Refuse gradients that a backward pass of the task's own has added to a parameter; a hook."""
        if self._is_running:
            parameter.grad = None
            raise accumulated("backward()")
