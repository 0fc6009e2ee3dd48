"""The steps of a worker that has the whole model, and what they are made of; as in ``torch/``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.logits import check_foreign
from hvdtrain.backends.optimizers import MAIN, combined_rates
from hvdtrain.backends.options import INITIAL_SCALE
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.reduction.local_steps import OUTER_PREFIX, LocalStepBase, LocalSums, in_parts
from hvdtrain.backends.step_metrics import findings
from hvdtrain.backends.steps import PartsBase, WholeModelStep
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch, TensorFlowPending
from hvdtrain.backends.tensorflow.computation import Computation
from hvdtrain.backends.tensorflow.functions import Compiled, accumulated_gradients, joined, native, of_counted
from hvdtrain.backends.tensorflow.objective.gathering import COLLECTIVES
from hvdtrain.backends.tensorflow.probes import count_frozen, values_of_first
from hvdtrain.backends.tensorflow.reduction.broadcast import broadcast_variables
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import ShardedParameters
from hvdtrain.backends.tensorflow.replica_state import TrainedSet
from hvdtrain.backends.tensorflow.state.model_state import Field
from hvdtrain.backends.tensorflow.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.step_clock import StepClock
from hvdtrain.backends.tensorflow.steps.optimizer_state import (
    ShardedMovingAverage,
    ShardedState,
    TrainingState,
    shard_optimizer,
)
from hvdtrain.backends.tensorflow.steps.optimizers import choose_optimizer, make_optimizers, take_own_rates
from hvdtrain.backends.tensorflow.steps.update import LossScale, ShardedUpdate, Update
from hvdtrain.backends.tensorflow.sync_batch_norm import find_batch_norms
from hvdtrain.backends.tensorflow.task_model import compiled, unused_methods
from hvdtrain.data.order import mix
from hvdtrain.workers.seeding import seed_host_step

Tensor = Any
Variable = Any


class Parts(PartsBase):
    """What a step is made of."""

    averages = ExponentialMovingAverage, ShardedMovingAverage
    kinds = TrainedSet, find_batch_norms, count_frozen
    owned: dict[str, list[Field]]  # what each optimizer trains
    factors: dict[str, float]  # what the learning rate of each is multiplied by, if not by 1
    slots: list[Any]  # what the optimizers keep
    trained_set: TrainedSet

    @property
    def scale_variables(self) -> list[Any]:
        """The variables of the loss scale, if there is one."""
        return [] if self.loss_scale is None else self.loss_scale.variables

    @property
    def optimized(self) -> set[int]:
        """The identities of the variables that the only optimizer knows."""
        return {id(variable) for variable in self.optimizers[MAIN]._trainable_variables}

    def trained(self) -> list[Field]:
        """Return the tensors that are trained now."""
        return list(self.tensors.trainable_fields())

    def make_shards(self) -> ShardedParameters | None:
        """Return the parameters divided among workers; None if each updates all of them."""
        return ShardedParameters.of(self.config, self.trainable, self.workers)

    def make_optimizers(self) -> None:
        """Make the optimizers and what they keep, and take the rates of the task's own."""
        if self.own_optimizer == "tf_optimizers":
            self.optimizers, self.owned = make_optimizers(self.task, self.computation.model, self.tensors)
        else:
            optimizer = choose_optimizer(self.task, self.config, self.tensors, self.groups.options)
            self.optimizers, self.owned = {MAIN: optimizer}, {MAIN: self.trained()}
        self.factors = {}
        if self.own_optimizer:
            rates = {name: take_own_rates(one, self.own_optimizer) for name, one in self.optimizers.items()}
            self.own_rates, self.factors = combined_rates(rates)
        pairs = [(optimizer, self.owned[name]) for name, optimizer in self.optimizers.items()]
        self.slots = [v for one, fields in pairs for v in shard_optimizer(one, fields, self.shards)]
        if self.own_optimizer:
            self.slot_bytes = sum(math.prod(v.shape) * native(v).dtype.size for v in self.slots)

    def make_rest(self, is_timed: bool) -> None:
        """Make loss scale, clock and notes."""
        computation, first = self.computation, next(iter(self.optimizers.values()))
        self.notes, self.loss_scale = unused_methods(computation.model), None
        if computation.precision == "fp16" and not isinstance(first, keras.optimizers.LossScaleOptimizer):
            first.loss_scale_factor = None
            initial = INITIAL_SCALE if self.config.precision == "fp16" else INITIAL_SCALE / 2
            self.loss_scale = LossScale(self.near, initial)
        self.clock = StepClock(computation.traced_workers, is_timed)


class PlainStep(WholeModelStep):
    """The mean gradient over the global batch, summed in one reduction, and an update with it."""

    collectives, pending = COLLECTIVES, TensorFlowPending
    updates = Update, ShardedUpdate, ShardedUpdate  # a graph has all gradients at once
    states = TrainingState, ShardedState
    computes = Computation
    computation: Computation
    parts: Parts
    state: TrainingState
    _function: Callable[[tuple[int, ...]], Callable[..., tuple[Tensor, Any]]]

    def trace(self) -> None:
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
        averages = [*parts.ema.to_broadcast(), *self.momenta]
        broadcast_variables([*parts.slots, *variables, *averages, *parts.scale_variables], root)
        parts.ema.follow_broadcast()
        parts.reducer.broadcast(root)
        if self.computation.layer_state:
            self.load_layers(self.workers.broadcast_object(self.computation.layer_state.read(), root))

    def gradients(
        self, arrays: Any, weights: Tensor, gradient_weights: Tensor, counts: tuple[int, ...]
    ) -> tuple[list[Tensor], Tensor]:
        """Return this worker's part of the gradient and the weighted sums of its values, while traced."""
        if len(weights.shape) == 1:
            return of_counted(counts, self._gradients)(arrays, weights, gradient_weights)
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
        self.parts.reducer.follow(batch.in_warmup)
        function = self._function(computation.counts_of(batch, training=True))
        if not batch.reduced_weight:
            function = self._function_of_none
        return function(batch, *self.arguments(batch, learning_rate, signals))

    def arguments(
        self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]
    ) -> tuple[Any, ...]:
        """Return what the traced step is called with, and seed what numpy and Python draw."""
        computation, share = self.computation, self.parts.ema.share(batch.step + 1)
        # a Python number would compile the step anew, and TensorFlow keeps a scalar made of one for ever
        rate = tf.constant(np.asarray(learning_rate, np.float32))
        seed_host_step(mix(computation.config.seed, batch.step, self.workers.rank) >> 1)
        return (
            *(batch.arrays, batch.weights, batch.gradient_weights, batch.total, rate),
            *(share, computation.seeds(batch.step), computation.numbers(signals)),
        )

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
        update.ema(share)
        return vector

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


class LocalStep(LocalStepBase, PlainStep):
    """A step of this worker alone; ``synchronize`` makes the workers equal."""

    def attach(self, parts: Parts) -> None:
        super().attach(parts)
        optimizer, fields = parts.optimizers[MAIN], parts.trainable
        self._parameters = [native(field.variable) for field in fields]
        self._steps = optimizer.iterations
        others = {id(optimizer.learning_rate), id(optimizer.iterations)}
        slots = [native(variable) for variable in optimizer.variables if id(variable) not in others]
        self._averaged = [*self._parameters, *slots]
        kept = self._parameters if parts.config.outer_optimizer == "nesterov" else []
        self._starts = [tf.Variable(p, trainable=False, name="start") for p in kept]
        self.momenta = [tf.Variable(tf.zeros_like(p), trainable=False, name="outer") for p in kept]
        self.fields: list[Field] = [
            replace(field, variable=momentum, trainable=False, prefix=OUTER_PREFIX)
            for field, momentum in zip(fields, self.momenta, strict=False)
        ]
        self._steps_before = 0
        self._traced = tf.function(self._synchronize, autograph=False)

    def _note_start(self) -> None:
        self._steps_before = int(self._steps.numpy())
        for start, parameter in zip(self._starts, self._parameters, strict=False):
            start.assign(parameter)

    def _synchronized(self, sums: LocalSums) -> Tensor:
        share = np.asarray(sums.ema_share(self.parts.ema.decay), np.float32)  # TensorFlow would keep a number
        vector = self._traced(sums.vector, tf.constant(share))
        self._agree(sums.steps)
        return vector

    def _zero(self, momentum: Variable) -> None:
        momentum.assign(tf.zeros_like(momentum))

    def _synchronize(self, vector: Tensor, share: Tensor) -> Tensor:
        """Collective. Average, take the outer step, take the weights into their average; traced."""
        vector = self._make_equal(vector)
        if self.momenta:
            self._step()
        self.parts.ema.update(share)
        return vector

    def _make_equal(self, vector: Tensor) -> Tensor:
        """Collective. Make parameters and slots equal, in place; return the sum of a vector."""
        if self.workers.size == 1:
            return vector
        parts = in_parts([(v.dtype.name, v.shape.num_elements() * v.dtype.size) for v in self._averaged])
        for number, places in enumerate(parts):
            variables = [self._averaged[place] for place in places]
            flat = tf.concat([tf.reshape(variable.read_value(), [-1]) for variable in variables], 0)
            flat = hvd.allreduce(flat, op=hvd.Average, name=f"hvdtrain.local.{number}")
            means = tf.split(flat, [variable.shape.num_elements() for variable in variables])
            for variable, mean in zip(variables, means, strict=True):
                variable.assign(tf.reshape(mean, variable.shape))
        return hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")

    def _step(self) -> None:
        """Let the outer optimizer take its step, from where the local steps started."""
        momentum, rate = self.parts.config.outer_momentum, self.parts.config.outer_learning_rate
        for parameter, start, kept in zip(self._parameters, self._starts, self.momenta, strict=True):
            gradient = start.read_value() - parameter.read_value()
            velocity = kept.read_value() * momentum + gradient
            kept.assign(velocity)
            parameter.assign(start.read_value() - (gradient + velocity * momentum) * rate)

    def _agree(self, steps: int) -> None:
        """Collective with fp16. Take the most steps counted by a worker, and the lowest loss scale of all."""
        # with fp16 each worker skips steps by itself; otherwise one without samples has not counted the last
        if self.parts.loss_scale is None:
            self._steps.assign(self._steps_before + steps)
            return
        variables = self.parts.loss_scale.variables
        own = tuple(float(variable.numpy()) for variable in variables), int(self._steps.numpy())
        gathered = self.workers.allgather_object(own)
        for variable, value in zip(variables, min(scale for scale, _ in gathered), strict=True):
            variable.assign(np.asarray(value).astype(variable.dtype.as_numpy_dtype))
        self._steps.assign(max(counted for _, counted in gathered))
