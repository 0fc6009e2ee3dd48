"""The stages of a step in TensorFlow, from the gradient weights to the moving average, in their order."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.options import LOWEST_SCALE, LossScaleBase
from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.step_metrics import NORM_INDEX, OVERFLOW_INDEX
from hvdtrain.backends.steps import PartsBase
from hvdtrain.backends.tensorflow.batches import Sized
from hvdtrain.backends.tensorflow.functions import clip_by_norm, dense, joined, native
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import segment_of
from hvdtrain.backends.tensorflow.steps.optimizer_state import slots_by_parameter

Tensor = Any


def own_scale(optimizer: Any) -> Tensor | None:
    """Return what an optimizer divides gradients by before it applies them; None if it does not."""
    is_plain = type(optimizer).scale_loss is keras.optimizers.Optimizer.scale_loss
    if is_plain and optimizer.loss_scale_factor is None:
        return None
    return tf.cast(optimizer.scale_loss(tf.constant(1.0)), tf.float32)


def scaled(gradients: Sequence[Tensor], factor: Tensor | None) -> list[Tensor]:
    """Return gradients times a factor; as they are if it is None."""
    return list(gradients) if factor is None else [g * tf.cast(factor, g.dtype) for g in gradients]


def unscaled(gradients: Sequence[Tensor], factor: Tensor | None) -> list[Tensor]:
    """Return gradients divided by a factor; as they are if it is None."""
    return list(gradients) if factor is None else [g / tf.cast(factor, g.dtype) for g in gradients]


class LossScale(LossScaleBase):
    """Keeps the gradients of fp16 in its range: they are scaled up before and down after."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.value = tf.Variable(self.value, trainable=False, dtype=tf.float32)
        self.is_exhausted = tf.Variable(False, trainable=False)
        self._steps_since_change = tf.Variable(0, trainable=False)

    @property
    def variables(self) -> list[Any]:
        """What it keeps from step to step."""
        return [self.value, self._steps_since_change, self.is_exhausted]

    def unscale(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Divide reduced gradients by the factor; return them and whether they are finite."""
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        return unscaled(gradients, self.factor), is_finite

    def adapt(self, is_finite: Tensor) -> None:
        """Adapt the scale to whether a step's gradients were finite."""
        value, steps = self.value.read_value(), self._steps_since_change + 1
        self.is_exhausted.assign(tf.logical_and(tf.logical_not(is_finite), value <= LOWEST_SCALE))
        grows = tf.logical_and(is_finite, steps >= self._growth_interval)
        grown = tf.where(grows, value * 2, value)
        self.value.assign(tf.where(is_finite, grown, tf.maximum(LOWEST_SCALE, value / 2)))
        changed = tf.logical_or(grows, tf.logical_not(is_finite))
        self._steps_since_change.assign(tf.where(changed, 0, steps))


class Update:
    """One optimizer update; a step calls the methods in the order in which they stand here.

    They are called while the step is traced. Parameters, the optimizer's slots and the moving average
    change only after every reduction of the step has succeeded.
    """

    def __init__(self, parts: PartsBase) -> None:
        self.loss_scale = parts.loss_scale
        self._is_local = parts.config.sync_every is not None
        self._fields = parts.trainable
        self._parameters = [field.variable for field in parts.trainable]
        self._optimizer: Any = parts.optimizers[MAIN]
        self._reducer: GradientReducer = parts.reducer
        self._shards: Any = parts.shards
        self._ema, self._clock, self._clip_norm = parts.ema, parts.clock, parts.config.clip_norm
        self._workers: Sized = parts.near
        self._zero = tf.Variable(0.0, trainable=False, name="zero")
        self._waits_for: list[Tensor] = []
        self._is_finite: Tensor | None = None
        self._own_scale: Tensor | None = None
        self._unused: list[int] = []  # places of parameters without a gradient here
        self._left_out: dict[str, Tensor] = {}  # by path, whether no worker has one
        self.begin()

    def begin(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self._reducer.attach({field.path: field.variable for field in self._fields})

    def scale(self, gradient_weights: Tensor) -> Tensor:
        """Return the samples' gradient weights, times the loss scale."""
        self._own_scale = own_scale(self._optimizer)
        if self._own_scale is not None:
            gradient_weights *= self._own_scale
        return gradient_weights if self.loss_scale is None else gradient_weights * self.loss_scale.factor

    def backward(self, losses: Tensor, gradient_weights: Tensor, tape: tf.GradientTape) -> list[Tensor]:
        """Return a micro-batch's part of the gradients, None for a parameter that it does not reach."""
        return tape.gradient(losses, [v.value for v in self._parameters], gradient_weights)

    def fill_in_unused(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[str]]:
        """Return dense gradients with zeros for parameters that were not reached, and their names."""
        self._unused = [place for place, gradient in enumerate(gradients) if gradient is None]
        unused = [self._fields[place].name for place in self._unused]
        return dense(gradients, self._parameters, self._zero), unused

    def reduce(self, gradients: Sequence[Tensor], vector: Tensor) -> tuple[list[Tensor], Tensor]:
        """Collective. Return the sums of the gradients and of the step's vector; see ``torch/``."""
        self._clock.ready([*gradients, vector])
        reduced, vector = self._reducer.finish(gradients, self._with_reached(vector))
        vector = self._without_reached(vector)
        self._waits_for = [*reduced, vector] if self._workers.may_reduce else []
        self._clock.reduced(self._waits_for)
        return reduced, vector

    def unscale_or_skip(self, gradients: list[Tensor], vector: Tensor) -> tuple[list[Tensor], Tensor]:
        """Take the loss scale off the gradients; if they are not finite, ``update`` will skip the step."""
        if self.loss_scale is None:
            self._is_finite = None
            return unscaled(gradients, self._own_scale), vector
        gradients, self._is_finite = self.loss_scale.unscale(gradients)
        with self._after_reductions():
            self.loss_scale.adapt(self._is_finite)
        return gradients, _with_number(vector, OVERFLOW_INDEX, self.loss_scale.is_exhausted)

    def normalize(
        self, gradients: list[Tensor], counted: Tensor | None, total_weight: Tensor
    ) -> list[Tensor]:
        """Divide the gradients by the share of the samples' weight that counted; by 1 if nothing did."""
        if counted is None:
            return gradients
        factor = tf.where(counted > 0, total_weight / counted, tf.ones((), counted.dtype))
        return list(tf.cond(tf.equal(factor, 1.0), lambda: gradients, lambda: scaled(gradients, factor)))

    def clip(self, gradients: list[Tensor], clip_norm: float) -> tuple[list[Tensor], Tensor]:
        """Scale the gradients so that their joint norm is at most that; return also what it was."""
        return clip_by_norm(gradients, clip_norm)

    def update(self, gradients: list[Tensor], learning_rate: Tensor) -> None:
        """Let the optimizer take its step, unless the gradients are not finite."""
        with self._after_reductions():
            self._optimizer.learning_rate.assign(learning_rate)
            if self._is_finite is None:
                self._applied(scaled(gradients, self._own_scale))
            else:
                tf.cond(self._is_finite, lambda: self._applied(gradients), lambda: tf.constant(False))

    def apply(
        self,
        gradients: list[Tensor],
        vector: Tensor,
        form: tuple[Sequence[str], Sequence[str]],
        total_weight: Tensor,
        learning_rate: Tensor | None,
    ) -> Tensor:
        """Collective. Reduce gradients, let the optimizer take a step; return the vector's sum."""
        names, weighted = form
        gradients, vector = self.reduce(gradients, vector)
        gradients, vector = self.unscale_or_skip(gradients, vector)
        counted = vector[len(names)] if "loss" in weighted else None
        gradients = self.normalize(gradients, counted, total_weight)
        if self._clip_norm is not None:
            gradients, norm = self.clip(gradients, self._clip_norm)
            vector = vector if self._is_local else _with_number(vector, NORM_INDEX, norm)
        if learning_rate is not None:
            self.update(gradients, learning_rate)
        return vector

    def ema(self, share: Tensor) -> None:
        """Take the weights into their moving average; local steps leave that to ``synchronize``."""
        if not self._is_local:
            with self._after_reductions():
                self._ema.update(share)

    def _applied(self, gradients: list[Tensor]) -> Tensor:
        """Let the optimizer take its step; what no worker has a gradient of keeps its values and slots."""
        updated = self._updated()
        slots = slots_by_parameter(self._optimizer) if self._left_out else {}
        kept = [
            (native(each), tf.identity(native(each)), self._left_out[path])
            for path, variable in updated
            if path in self._left_out
            for each in (variable, *slots.get(id(variable), ()))
        ]
        self._optimizer.apply(gradients, [variable for _, variable in updated])
        for variable, before, is_left_out in kept:
            variable.assign(tf.where(is_left_out, before, variable))
        return tf.constant(True)

    def _updated(self) -> list[tuple[str, Any]]:
        """Return what the optimizer updates, one variable for each gradient, with the parameter's path."""
        return [(field.path, field.variable) for field in self._fields]

    def _with_reached(self, vector: Tensor) -> Tensor:
        """Return a step's vector with a 1 for each parameter that has a gradient here, 0 for the others."""
        unused = set(self._unused)
        return joined(vector, [0.0 if place in unused else 1.0 for place in range(len(self._fields))])

    def _without_reached(self, vector: Tensor) -> Tensor:
        """Return the sum of such vectors without that; a worker that lacks gradients looks at it."""
        end = vector.shape[0] - len(self._fields)
        self._left_out = {
            self._fields[place].path: tf.equal(vector[end + place], 0) for place in self._unused
        }
        return vector[:end]

    def _after_reductions(self) -> AbstractContextManager[Any]:
        """Return a context after all reductions, by one operation: edges from each would be a million."""
        return tf.control_dependencies([tf.group(*self._waits_for)]) if self._waits_for else nullcontext()


def _with_number(vector: Tensor, index: int, number: Tensor) -> Tensor:
    """Return a vector with another number at an index from its end."""
    return tf.concat([vector[:index], [tf.cast(number, vector.dtype)], vector[index + 1 :]], 0)


class ShardedUpdate(Update):
    """The update of a step after which every worker has the whole gradient and updates its part."""

    def update(self, gradients: list[Tensor], learning_rate: Tensor) -> None:
        """Collective. Let the optimizer update this worker's part, and gather all parts."""
        self._shards.use(gradients)
        with self._after_reductions():
            self._shards.follow()
        by_path = {field.path: gradient for field, gradient in zip(self._fields, gradients, strict=True)}
        own = [segment_of(segment, by_path[segment.entry.path]) for segment in self._shards.segments]
        super().update(own or [tf.zeros([0])], learning_rate)
        self._shards.gather(lambda segment: segment.tensor.value, "parameters")

    def _updated(self) -> list[tuple[str, Any]]:
        paths = [segment.entry.path for segment in self._shards.segments] or [""]
        return list(zip(paths, self._shards.variables, strict=True))
