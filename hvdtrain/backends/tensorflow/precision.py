"""Half precision in Keras: a policy of types, and a loss scale for fp16."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.objective.losses import mask_of
from hvdtrain.backends.options import GROWTH_INTERVAL, INITIAL_SCALE, LOWEST_SCALE, LossScaleBase
from hvdtrain.backends.tensorflow.objective.losses import with_mask
from hvdtrain.backends.tensorflow.traced_workers import Sized
from hvdtrain.config import Config
from hvdtrain.errors import TaskError

Tensor = Any

_POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
_HALVES = (tf.bfloat16, tf.float16)


def float_bits_of(model: Any) -> int:
    """Return the bits of the numbers that a model takes: 64 if a variable or an input has them, else 32."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    return 64 if any(str(value.dtype) == "float64" for value in (*model.variables, *inputs)) else 32


@contextmanager
def autocast(precision: str) -> Iterator[None]:
    """Return a context in which a model is made whose layers compute in half precision."""
    before = keras.config.dtype_policy()
    if precision != "fp32":
        keras.config.set_dtype_policy(_POLICIES[precision])
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def precision_of(model: Any, precision: str) -> str:
    """Return the precision in which a model computes: the config's, or that of its layers' policies."""
    policies = {layer.dtype_policy.name for layer in model._flatten_layers()}
    found = next((name for name, policy in _POLICIES.items() if policy in policies), "fp32")
    return found if precision == "fp32" else precision


def new_loss_scale(config: Config, precision: str, optimizer: Any, workers: Sized) -> "LossScale | None":
    """Return the loss scale of a job; None if it needs none, or its optimizer scales losses itself."""
    if precision != "fp16" or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    optimizer.loss_scale_factor = None
    return LossScale(workers) if config.precision == "fp16" else LossScale(workers, INITIAL_SCALE / 2)


def check_scaled(precision: str, optimizers: Sequence[Any]) -> None:
    """Check that the optimizers of a task's own step scale the losses of a model that computes in fp16."""
    plain = [one for one in optimizers if not isinstance(one, keras.optimizers.LossScaleOptimizer)]
    if precision == "fp16" and plain:
        raise TaskError(
            "layers of the model compute in float16 (mixed_float16), and nothing scales the losses of "
            "tf_step",
            f"Give keras.optimizers.LossScaleOptimizer({type(plain[0]).__name__}(...)) as the task's "
            "optimizer, or use mixed_bfloat16.",
        )


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


def cast_outputs_to_fp32(model: Any, precision: str) -> Any:
    """Return the model with outputs in fp32, so that losses and metrics are computed in it."""
    return model if precision == "fp32" else _Fp32Outputs(model)


class _Fp32Outputs:
    """A model whose outputs are fp32; in everything else the model itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(_cast_to_fp32, self._model(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        is_part = isinstance(value, keras.Layer) and type(self._model).call is keras.Model.call
        return _Fp32Outputs(value) if is_part else value


def _cast_to_fp32(value: Any) -> Any:
    is_half = tf.is_tensor(value) and value.dtype in _HALVES
    return with_mask(tf.cast(value, tf.float32), mask_of(value)) if is_half else value


class LossScale(LossScaleBase):
    """Keeps the gradients of fp16 in its range: they are scaled up before and down after."""

    def __init__(
        self, workers: Sized, initial: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        super().__init__(workers, growth_interval)
        self.value = tf.Variable(initial, trainable=False, dtype=tf.float32)
        self.skipped = tf.Variable(0, trainable=False)
        self.is_exhausted = tf.Variable(False, trainable=False)
        self._steps_since_change = tf.Variable(0, trainable=False)

    @property
    def variables(self) -> list[Any]:
        """What it keeps from step to step."""
        return [self.value, self._steps_since_change, self.skipped, self.is_exhausted]

    def unscale(self, gradients: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Divide reduced gradients by the factor; return them and whether they are finite."""
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        return unscaled(gradients, self.factor), is_finite

    def adapt(self, is_finite: Tensor) -> None:
        """Adapt the scale to whether a step's gradients were finite."""
        value, steps = self.value.read_value(), self._steps_since_change + 1
        self.is_exhausted.assign(tf.logical_and(tf.logical_not(is_finite), value <= LOWEST_SCALE))
        self.skipped.assign_add(1 - tf.cast(is_finite, tf.int32))
        grows = tf.logical_and(is_finite, steps >= self._growth_interval)
        grown = tf.where(grows, value * 2, value)
        self.value.assign(tf.where(is_finite, grown, tf.maximum(LOWEST_SCALE, value / 2)))
        changed = tf.logical_or(grows, tf.logical_not(is_finite))
        self._steps_since_change.assign(tf.where(changed, 0, steps))
