"""The optimizer that a task brings or the config names; ``torch/steps/optimizers.py`` does so for PyTorch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.optimizers import (
    ParameterOptions,
    check_named_optimizers,
    check_own_optimizer,
    check_owners,
    check_positive,
    combined_rates,
    constructor_default,
    scheduled,
)
from hvdtrain.backends.options import LARS_EPSILON, LARS_TRUST, is_matrix
from hvdtrain.backends.records import OwnRates
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.steps.formulas import SGD, AdamW, Groups, TwoMoments, rate_and_decay
from hvdtrain.config import Config
from hvdtrain.errors import TaskError

Tensor = Any
Variable = Any
NamedOptimizers = tuple[dict[str, keras.optimizers.Optimizer], dict[str, list[Field]]]


def large_batch_optimizer(
    config: Config, fields: Iterable[Field], groups: Groups = ()
) -> keras.optimizers.Optimizer:
    """Make lars or lamb, as the config says, for a model's trainable variables, in their order."""
    adapted = [is_matrix(field.path, field.shape) for field in fields]
    groups = groups or [(1.0, config.weight_decay)] * len(adapted)
    if config.optimizer == "lars":
        return LARS(adapted, groups, config.momentum)
    return LAMB(adapted, groups, config.adam_beta1, config.adam_beta2, config.adam_epsilon)


class LARS(SGD):
    """Stochastic gradient descent whose gradient is scaled to each parameter's norm; see ``torch/``."""

    def __init__(self, adapted: Sequence[bool], groups: Groups, momentum: float) -> None:
        super().__init__(momentum=momentum, groups=groups, name="lars")
        self.adapted = adapted

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Update one variable."""
        rate, decay = rate_and_decay(self, variable, learning_rate)
        w = native(variable)
        g = tf.cast(tf.convert_to_tensor(gradient), w.dtype)
        if self.adapted[self._get_variable_index(variable)]:
            w_norm, g_norm = tf.norm(w), tf.norm(g)
            factor = LARS_TRUST * w_norm / (g_norm + decay * w_norm + LARS_EPSILON)
            if decay:
                g += decay * w
            g *= _where_both(w_norm, g_norm, factor)
        self.move(variable, g, rate)


class LAMB(TwoMoments):
    """Adam with decoupled decay whose update is scaled to each parameter's norm; see ``torch/``."""

    def __init__(
        self, adapted: Sequence[bool], groups: Groups, beta1: float, beta2: float, epsilon: float
    ) -> None:
        super().__init__(beta1, beta2, epsilon, groups, name="lamb")
        self.adapted = adapted

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Update one variable."""
        w = native(variable)
        index = self._get_variable_index(variable)
        rate, decay = rate_and_decay(self, variable, learning_rate)
        g = tf.cast(tf.convert_to_tensor(gradient), w.dtype)
        m, v = (native(self.slots[name][index]) for name in ("first_moment", "second_moment"))
        correction1, root2 = self.corrections()
        first = m.assign_add((g - m) * (1 - self.beta1), read_value=True)
        second = v.assign(v * self.beta2 + g * g * (1 - self.beta2), read_value=True)
        scale = tf.sqrt(second) / tf.cast(root2, w.dtype) + self.epsilon
        update = first / (scale * tf.cast(correction1, w.dtype))
        if self.adapted[index]:
            if decay:
                update += decay * w
            w_norm, u_norm = tf.norm(w), tf.norm(update)
            update *= _where_both(w_norm, u_norm, w_norm / u_norm)
        w.assign_sub(tf.cast(rate, w.dtype) * update)


def _where_both(one: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """Return a factor of two norms; 1 where either is 0."""
    return tf.where((one > 0) & (other > 0), factor, tf.ones_like(factor))


def choose_optimizer(
    task: Any, config: Config, model: ModelState, options: Mapping[str, ParameterOptions]
) -> keras.optimizers.Optimizer:
    """Make the optimizer of a job, for the model's trainable variables.

    A built-in one has ``groups``, and ``slots`` by their portable names. Its state has the names, and counts
    steps, as that of the other framework does, since a checkpoint is read by both.
    """
    if hasattr(task, "tf_optimizer"):
        optimizer = task.tf_optimizer()
        check_own_optimizer(optimizer, keras.optimizers.Optimizer, "tf_optimizer", "a Keras optimizer")
        assert isinstance(optimizer, keras.optimizers.Optimizer)  # that it is one was checked
        return optimizer
    own = [options[field.name] for field in model.trainable_fields()]
    groups = [(each.factor, each.weight_decay) for each in own]
    if config.optimizer in ("lars", "lamb"):
        return large_batch_optimizer(config, model.trainable_fields(), groups)
    if config.optimizer == "adamw":
        return AdamW(config.adam_beta1, config.adam_beta2, config.adam_epsilon, groups)
    return SGD(momentum=config.momentum, groups=groups)


def take_own_rates(optimizer: keras.optimizers.Optimizer, method: str = "tf_optimizer") -> OwnRates:
    """Return the learning rate of a task's optimizer: one, as Keras has no parameter groups."""
    inner = optimizer
    while getattr(inner, "inner_optimizer", None) is not None:  # one that scales losses
        inner = inner.inner_optimizer
    if not isinstance(inner._learning_rate, keras.Variable):
        raise scheduled(method, type(inner._learning_rate).__name__)
    if inner.use_ema:
        raise TaskError(
            f"the optimizer of {method}() keeps a moving average of the weights (use_ema=True), which "
            "evaluation, checkpoints and exports would not use",
            f"Leave out use_ema, and set ema_decay: {inner.ema_momentum:g} in the config: they then use the "
            "average, which does not overwrite the weights in training.",
        )
    # the shortest number that is the same in 32 bits: 0.001, not 0.0010000000474974513
    base = float(str(np.float32(inner._learning_rate.numpy())))
    check_positive(base, method)
    default = constructor_default(inner, "learning_rate")
    is_default = isinstance(default, int | float) and np.float32(default) == np.float32(base)
    return OwnRates(type(inner).__name__, base, bool(is_default))


def make_optimizers(task: Any, model: keras.Model, tensors: ModelState) -> NamedOptimizers:
    """Make the optimizers of a task that names several; return them, and the parameters that each trains."""
    method, given = "tf_optimizers", task.tf_optimizers(model)
    pairs = given if isinstance(given, Mapping) else {}
    for name, pair in pairs.items():
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], list | tuple)):
            raise TaskError(
                f"{method}(model) must give an optimizer and the list of the variables that it trains as "
                f"{name!r}, found a {type(pair).__name__}",
                f'Return {{"{name}": (keras.optimizers.Adam(1e-4), model.{name}.trainable_variables)}}, for '
                "example.",
            )
    optimizers = {name: pair[0] for name, pair in pairs.items()} or given
    by_name = check_named_optimizers(optimizers, keras.optimizers.Optimizer, method)
    if len(set(map(id, by_name.values()))) < len(by_name):
        raise TaskError(f"{method}(model) gave one optimizer under two names", "Make one for each name.")
    known = {id(field.variable) for field in tensors.fields}
    fields = {id(field.variable): field for field in tensors.trainable_fields()}
    variables = {name: {id(v): v for v in pairs[name][1]} for name in by_name}
    owned = {name: [fields[i] for i in ids if i in fields] for name, ids in variables.items()}
    check_owners(
        method,
        [field.name for field in fields.values()],
        {name: [field.name for field in of_one] for name, of_one in owned.items()},
        {
            name: sum(v.trainable and i not in known for i, v in ids.items())
            for name, ids in variables.items()
        },
    )
    return by_name, owned


def take_rates(
    optimizers: Mapping[str, keras.optimizers.Optimizer], method: str
) -> tuple[OwnRates, dict[str, float]]:
    """Return the learning rates of a task's optimizers, and what the largest is multiplied by for each."""
    return combined_rates({name: take_own_rates(one, method) for name, one in optimizers.items()})
