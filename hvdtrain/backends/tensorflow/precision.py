"""Half precision in Keras: a policy of types, and a loss scale for fp16.

``_torch_precision`` does the same for PyTorch; what they share stands in ``_precision``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends._precision import GROWTH_INTERVAL, INITIAL_SCALE, LOWEST_SCALE

Tensor = Any

_POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
_HALVES = (tf.bfloat16, tf.float16)


@contextmanager
def computing(precision: str) -> Iterator[None]:
    """Context in which a model is made: its layers compute in half precision, whenever they are called.

    Layers that the user gave a type keep it.
    """
    if precision == "fp32":
        yield
        return
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(_POLICIES[precision])
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def widen_outputs(model: Any, precision: str) -> Any:
    """Give the model such that it gives fp32, so that losses and metrics are computed in it."""
    return model if precision == "fp32" else _Wide(model)


class _Wide:
    """A model that gives fp32; in everything else the model itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(_widened, self._model(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _widened(value: Any) -> Any:
    is_half = tf.is_tensor(value) and value.dtype in _HALVES
    return tf.cast(value, tf.float32) if is_half else value


class LossScale:
    """Keeps the gradients of fp16 in its range: they are scaled up before and down after.

    Where gradients overflow, the step is skipped and the scale halves; after many steps without an
    overflow it doubles. It is asked of the gradients that all workers have in common, so all decide
    alike without another collective.

    Source: Micikevicius et al. 2018 (arXiv:1710.03740), with the numbers of torch.amp.GradScaler.

    Attributes:
        value: the scale.
        skipped: steps that were skipped.
        is_lost: whether the last step's gradients overflowed at the lowest scale: it is no longer
            fp16 that is to blame.
    """

    def __init__(self, initial: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.value = tf.Variable(initial, trainable=False, dtype=tf.float32)
        self.skipped = tf.Variable(0, trainable=False)
        self.is_lost = tf.Variable(False, trainable=False)
        self._growth_interval = growth_interval
        self._steps_since_change = tf.Variable(0, trainable=False)

    def apply(self, gradients: Sequence[Tensor], update: Callable[[list[Tensor]], None]) -> None:
        """Divide reduced gradients by the scale, adapt it, and update where they are finite."""
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        unscaled = [g / tf.cast(self.value, g.dtype) for g in gradients]

        def updated() -> Tensor:
            update(unscaled)
            return tf.constant(True)

        tf.cond(is_finite, updated, lambda: tf.constant(False))
        self._adapt(is_finite)

    def spoil(self, sums: Tensor) -> Tensor:
        """Give the sums of a step, the loss as NaN where it is lost: training must not go on."""
        loss = tf.where(self.is_lost, float("nan"), sums[0])
        return tf.concat([[loss], sums[1:]], 0)

    def _adapt(self, is_finite: Tensor) -> None:
        value, steps = self.value.read_value(), self._steps_since_change + 1
        self.is_lost.assign(tf.logical_and(tf.logical_not(is_finite), value <= LOWEST_SCALE))
        self.skipped.assign_add(1 - tf.cast(is_finite, tf.int32))
        grows = tf.logical_and(is_finite, steps >= self._growth_interval)
        grown = tf.where(grows, value * 2, value)
        self.value.assign(tf.where(is_finite, grown, tf.maximum(LOWEST_SCALE, value / 2)))
        changed = tf.logical_or(grows, tf.logical_not(is_finite))
        self._steps_since_change.assign(tf.where(changed, 0, steps))
