"""The step of most jobs: passes over micro-batches, one reduction, one update. ``torch/`` has the same."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.logits import check_foreign
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.step_metrics import PendingVector, findings
from hvdtrain.backends.steps import WholeModelStep
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch, TensorFlowPending
from hvdtrain.backends.tensorflow.computation import Computation
from hvdtrain.backends.tensorflow.functions import (
    Compiled,
    accumulated_gradients,
    joined,
    native,
    of_counted,
)
from hvdtrain.backends.tensorflow.objective.metric_objects import COLLECTIVES
from hvdtrain.backends.tensorflow.probes import find_comparing, values_of_first
from hvdtrain.backends.tensorflow.reduction.broadcast import broadcast_variables
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.parts import Parts
from hvdtrain.backends.tensorflow.steps.sharded_state import ShardedState
from hvdtrain.backends.tensorflow.steps.update import ShardedUpdate, Update
from hvdtrain.backends.tensorflow.task_model import compiled
from hvdtrain.backends.tensorflow.traced_workers import Sized
from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers

Tensor = Any


class PlainStep(WholeModelStep):
    """The mean gradient over the global batch, summed in one reduction, and an update with it."""

    collectives = COLLECTIVES
    updates = Update, ShardedUpdate, ShardedUpdate  # a graph has all gradients at once
    states = TrainingState, ShardedState
    comparing = staticmethod(find_comparing)
    computation: Computation
    parts: Parts
    state: TrainingState
    _function: Callable[[tuple[int, ...]], Callable[..., tuple[Tensor, Any]]]

    def __init__(self, task: Any, config: Config, workers: Workers) -> None:
        self.workers = workers
        self.computation = Computation(task, config, workers)
        self.near: Sized = self.computation.traced_workers

    @property
    def is_timed(self) -> bool:
        """Whether the clock can tell the time of this worker from that of the others."""
        return not self.computation.batch_norm.layers

    def trace(self) -> None:
        """Let what steps call be traced anew, when the next batch comes."""
        gradients = self.gradients_of_micro_batch
        self._gradients = compiled(gradients) if self.parts.config.compile else gradients
        self.computation.trace()
        # batches without their padding have a function for each number of samples that count, which the
        # task's functions see as the shape; there are few
        learnt = self.computation.learnt
        self._function = cache(lambda counts: Compiled(partial(self.traced, True, counts), learnt))
        # a worker without samples, as there may be in the last local step, has no gradient
        self._function_of_none = Compiled(partial(self.traced, False, ()), learnt)

    def broadcast(self, root: int) -> None:
        """Collective. Copy the root's variables to every worker."""
        parts = self.parts
        variables = [field.variable for field in parts.tensors.fields]
        averages = [*parts.ema.to_broadcast(), *self.to_broadcast()]
        broadcast_variables([*parts.slots, *variables, *averages, *parts.scale_variables], root)
        parts.ema.follow_broadcast()
        parts.reducer.broadcast(root)
        if self.computation.layer_state:
            self.load_layers(self.workers.broadcast_object(self.computation.layer_state.read(), root))

    def train(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Collective. Do a step."""
        vector, (names, weighted, unused) = self.run(batch, learning_rate, signals)
        return TensorFlowPending(
            names,
            vector,
            batch.total_weight,
            unused,
            weighted,
            timed=self.parts.clock.timed,
            workers=self.workers.size,
        )

    def gradients(
        self, arrays: Any, weights: Tensor, gradient_weights: Tensor, counts: tuple[int, ...]
    ) -> tuple[list[Tensor], Tensor]:
        """Return this worker's part of the gradient and the weighted sums of its values, while traced."""
        if len(weights.shape) == 1:
            found: tuple[list[Tensor], Tensor]
            found = of_counted(counts, self._gradients)(arrays, weights, gradient_weights)
            return found
        apart = self.parts.reducer.is_early
        return accumulated_gradients(self._gradients, arrays, weights, gradient_weights, counts, apart=apart)

    def gradients_of_micro_batch(
        self, micro_batch: Any, weights: Tensor, gradient_weights: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return one micro-batch's part of the gradient and the weighted sums of its values."""
        computation = self.computation
        with tf.GradientTape() as tape:
            losses, own, rows = computation.per_sample(micro_batch, weights, training=True)
        own_weights = gradient_weights if own is None else gradient_weights * own
        gradients = self.update.backward(losses, own_weights, tape)
        # traced once: which variables the graph reaches does not change from step to step
        gradients, computation.unused = self.update.fill_in_unused(gradients)
        return gradients, tf.linalg.matvec(rows, weights)

    def dry_run(self, batch: TensorFlowBatch, training: bool, draws: list[str]) -> dict[str, NDArray[Any]]:
        """Return the loss and the metrics of a batch's first micro-batch, by name."""

        def rows_of(micro_batch: Any, weights: Tensor, gradient_weights: Tensor) -> Tensor:
            with tf.GradientTape() as tape, tf.GradientTape() as other:
                losses, own, rows = self.computation.per_sample(micro_batch, weights, training)
            if training:
                self._check_variables(losses, other)
                own_weights = gradient_weights if own is None else gradient_weights * own
                self.update.backward(losses, own_weights, tape)
            return rows

        return values_of_first(self.computation, batch, training, draws, rows_of)

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self.update.begin()

    def run(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> Any:
        """Collective. Run the traced step; return its vector and what was learnt when it was traced."""
        computation = self.computation
        computation.learn_form(batch, training=True)
        self.parts.reducer.follow(batch.in_warmup)
        leaves_out = batch.is_padded and computation.leaves_out[True]
        function = self._function(batch.counts if leaves_out else ())
        if not batch.reduced_weight:
            function = self._function_of_none
        return function(batch, *self.arguments(batch, learning_rate, signals))

    def arguments(
        self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]
    ) -> tuple[Any, ...]:
        """Return what the traced step is called with, and seed what numpy and Python draw."""
        share = self.parts.ema.share(batch.step + 1)
        return self.computation.arguments(batch, learning_rate, share, signals)

    def traced(  # noqa: PLR0917 - tensors, by position as a compiled step is called
        self,
        updates: bool,
        counts: tuple[int, ...],
        arrays: Any,
        weights: Tensor,
        gradient_weights: Tensor,
        total_weight: Tensor,
        learning_rate: Tensor,
        share: Tensor,
        seeds: Tensor,
        signals: Tensor,
    ) -> Tensor:
        """Collective. Do a step, while it is traced."""
        computation, update = self.computation, self.update
        computation.set_seeds(seeds)
        gradients, sums = self.gradients(arrays, weights, update.scale(gradient_weights), counts)
        unused = float(len(computation.unused))
        vector = joined(sums, *self.parts.clock.numbers(), findings(unused), signals)
        form = computation.names, computation.weighted
        vector = update.apply(gradients, vector, form, total_weight, learning_rate if updates else None)
        self.average(share)
        return vector

    def average(self, share: Tensor) -> None:
        """Take the weights into their moving average, while a step is traced."""
        self.update.ema(share)

    def load_layers(self, state: PortableState) -> None:
        """Let layers load themselves what was assigned; steps that were traced with tensors of theirs go."""
        if self.computation.layer_state.load(state):
            self.trace()

    def _check_variables(self, losses: Tensor, tape: tf.GradientTape) -> None:
        """Refuse trainable variables outside of the model for which losses have a gradient."""
        own = {id(native(variable)) for variable in self.computation.model.variables}
        foreign = [v for v in tape.watched_variables() if v.trainable and id(v) not in own]
        gradients = tape.gradient(losses, foreign) if foreign else []
        for variable, gradient in zip(foreign, gradients, strict=True):
            if gradient is not None:
                check_foreign(self.parts.task, "tf", variable, is_parameter=True)
