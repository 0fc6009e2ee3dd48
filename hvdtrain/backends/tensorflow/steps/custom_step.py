"""A task's own training step; ``torch/`` has the same, and ``backends/custom_step.py`` the rules."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.custom_step import (
    CustomStepRules,
    Optimizers,
    StepPart,
    own_step_of,
)
from hvdtrain.backends.step_metrics import PendingVector
from hvdtrain.backends.tensorflow.activations import ActivationMeter
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch, TensorFlowPending
from hvdtrain.backends.tensorflow.functions import Phase, joined, of_counted
from hvdtrain.backends.tensorflow.precision import check_scaled
from hvdtrain.backends.tensorflow.probes import values_of_first
from hvdtrain.backends.tensorflow.steps.parts import Parts
from hvdtrain.backends.tensorflow.steps.plain_step import PlainStep
from hvdtrain.backends.tensorflow.steps.step_number import CompiledByStep, StepNumber
from hvdtrain.backends.tensorflow.steps.step_optimizer import Calls, StepOptimizer
from hvdtrain.errors import TaskError

Tensor = Any


class CustomStep(CustomStepRules, PlainStep):
    """A task's own training step: it calls the model and its optimizers as it likes."""

    def attach(self, parts: Parts) -> None:
        """Take the parts of the step. Local: no collective."""
        check_scaled(self.computation.precision, [one for one, _ in parts.named.values()])
        self.parts, workers = parts, self.computation.traced_workers
        self._step: Any = own_step_of(parts.task, parts.config)
        self._calls = Calls(list(parts.named), workers)
        self._optimizers = {
            name: StepOptimizer(
                name,
                optimizer,
                fields,
                parts.config,
                self._calls,
                factor=parts.factors.get(name, 1.0),
                workers=workers,
            )
            for name, (optimizer, fields) in parts.named.items()
        }
        self._given = Optimizers(self._optimizers)
        self.trace()

    def trace(self) -> None:
        """Let what steps call be traced anew, when the next batch comes."""
        self.computation.trace()
        changing = [*self.changed_early(), *self.computation.seed_states]
        others = (self.computation.learnt, changing, self._calls.error_of)
        self._function = cache(lambda counts: CompiledByStep(partial(self._traced, counts), *others))

    def changed_early(self) -> list[Any]:
        """Return the variables that a step changes before its last reduction."""
        parts = self.parts
        return [*self.computation.model.variables, *parts.slots, *parts.ema.to_broadcast()]

    def train(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Collective. Do a step."""
        function = self._function(batch.counts if batch.is_padded else ())
        vector, (names, weighted, unused) = function(batch, *self.arguments(batch, learning_rate, signals))
        self.parts.trained_set.look()
        return TensorFlowPending(names, vector, batch.total_weight, unused, weighted)

    def dry_run(
        self, batch: TensorFlowBatch, training: bool, meter: ActivationMeter, draws: list[str]
    ) -> dict[str, NDArray[Any]]:
        """Collective. Return the loss and the metrics of a batch's first micro-batch, by name."""
        if not training:
            return super().dry_run(batch, training, meter, draws)

        def rows_of(micro_batch: Any, weights: Tensor, gradient_weights: Tensor) -> Tensor:
            part = StepPart(weights, gradient_weights, batch.total, None)
            return self._rows(micro_batch, StepNumber(batch.step), part)

        return values_of_first(self.computation, batch, training, draws, rows_of)

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self._calls.begin()
        for optimizer in self._optimizers.values():
            optimizer.begin(None)

    def _traced(self, counts: tuple[int, ...], number: StepNumber, *tensors: Any) -> Tensor:
        """Collective. Do a step, while it is traced; the tensors are those of ``PlainStep``."""
        arrays, weights, gradient_weights, total_weight, learning_rate, share, seeds, signals = tensors
        computation = self.computation
        computation.set_seeds(seeds)

        def sums_of(micro_batch: Any, weights: Tensor, gradient_weights: Tensor) -> Tensor:
            part = StepPart(weights, gradient_weights, total_weight, learning_rate)
            return tf.linalg.matvec(self._rows(micro_batch, number, part), weights)

        sums = of_counted(counts, sums_of)(arrays, weights, gradient_weights)
        vector = joined(sums, [float(len(computation.unused)), 0.0], signals)
        if self.computation.traced_workers.may_reduce:
            with tf.control_dependencies(self._calls.announce_end(computation.names, computation.weighted)):
                vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")
        self.parts.ema.update(share)
        return vector

    def _rows(self, micro_batch: Any, number: StepNumber, part: StepPart) -> Tensor:
        """Collective. Do the task's step, or a dry run of it, and return the rows of its values."""
        run = partial(self._call, number=number, samples=part)
        rows = self.computation.per_sample(micro_batch, part.weights, True, run).rows
        self.computation.unused = [name for one in self._optimizers.values() for name in one.unused]
        return rows

    def _call(
        self, phase: Phase, batch: Mapping[str, Tensor], number: StepNumber, samples: StepPart
    ) -> tuple[Any, dict[str, Any]]:
        """Collective. Call the task's step and return its loss and its metrics.

        In a dry run, which has no learning rate, nothing is reduced or updated.
        """
        with self._running(number, samples) as optimizers:
            result: tuple[Any, dict[str, Any]] = self._step(phase, batch, optimizers)
        if phase.added_loss() is not None:
            raise TaskError(
                "the model adds losses of its own (add_loss or regularizers), and the task's own step does "
                "not read them",
                "Add tf.add_n(model.losses) to the losses that are minimized.",
            )
        return result
