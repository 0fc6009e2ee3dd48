"""The optimizer that a task brings or the config names; ``torch/steps/optimizers.py`` does so for PyTorch."""

from collections.abc import Mapping, Sequence
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
    constructor_default,
    scheduled,
)
from hvdtrain.backends.options import LARS_EPSILON, LARS_TRUST, is_matrix
from hvdtrain.backends.records import OwnRates
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.config import Config
from hvdtrain.errors import TaskError

Tensor = Any
Variable = Any
# for each variable, in the order in which the optimizer is built: what the learning rate is multiplied by,
# the weight decay, and whether lars or lamb scales its updates to its norm
Groups = Sequence[tuple[float, float, bool]]
Options = tuple[float, bool]  # the last two of these


class Grouped(keras.optimizers.Optimizer):
    """What the optimizers here have in common: options of each variable, slots by their portable names."""

    move: Any  # updates a variable by its gradient, learning rate, slots and options

    def __init__(self, learning_rate: float, slot_names: Sequence[str], groups: Groups, name: str) -> None:
        super().__init__(learning_rate=learning_rate, name=name)
        self.slot_names, self.groups = slot_names, groups

    def build(self, variables: list[Variable]) -> None:
        """Make the slots."""
        if not self.built:
            super().build(variables)
            self.slots = {name: self.add_optimizer_variables(variables, name) for name in self.slot_names}

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Update one variable."""
        w, place = native(variable), self._get_variable_index(variable)
        factor, decay, adapts = self.groups[place] if self.groups else (1.0, 0.0, False)
        rate = learning_rate if factor == 1 else learning_rate * factor
        slots = [native(of_all[place]) for of_all in self.slots.values()]
        self.move(w, tf.cast(tf.convert_to_tensor(gradient), w.dtype), rate, slots, (decay, adapts))


class SGD(Grouped):
    """SGD by PyTorch's formula; Keras's folds the learning rate, which may change, into the momentum.

    It is LARS, see ``torch/``, for parameters whose options say that it adapts to their norms.
    """

    def __init__(
        self, learning_rate: float = 0.01, momentum: float = 0.0, groups: Groups = (), name: str = "sgd"
    ) -> None:
        super().__init__(learning_rate, ["momentum"] if momentum else [], groups, name)
        self.momentum = momentum

    def move(self, w: Variable, g: Tensor, rate: Tensor, slots: list[Any], options: Options) -> None:
        """Update one variable."""
        (decay, adapts), rate, factor = options, tf.cast(rate, w.dtype), None
        if adapts:
            w_norm, g_norm = tf.norm(w), tf.norm(g)
            factor = LARS_TRUST * w_norm / (g_norm + decay * w_norm + LARS_EPSILON)
            factor = _where_both(w_norm, g_norm, factor)
        if decay:
            g += decay * w
        if factor is not None:
            g *= factor
        if not slots:
            tf.raw_ops.ResourceApplyGradientDescent(var=w.handle, alpha=rate, delta=g)
            return
        momentum = tf.constant(self.momentum, w.dtype)
        tf.raw_ops.ResourceApplyMomentum(
            var=w.handle, accum=slots[0].handle, lr=rate, grad=g, momentum=momentum
        )


class TwoMoments(Grouped):
    """What adamw and lamb have in common: the moments of the gradient, and what takes their bias off."""

    def __init__(self, beta1: float, beta2: float, epsilon: float, groups: Groups, name: str) -> None:
        super().__init__(1e-3, ["first_moment", "second_moment"], groups, name)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

    def corrections(self) -> tuple[Tensor, Tensor]:
        """Return 1 - beta1**t and sqrt(1 - beta2**t) for the step t that is being done."""
        # 1 - 0.999 in 32 bits is off by 1e-5
        step = tf.cast(self.iterations.value + 1, tf.float64)
        correction1 = 1 - tf.pow(tf.constant(self.beta1, tf.float64), step)
        return correction1, tf.sqrt(1 - tf.pow(tf.constant(self.beta2, tf.float64), step))


class AdamW(TwoMoments):
    """AdamW by PyTorch's formula; Keras's adds epsilon before it corrects the bias."""

    def move(self, w: Variable, g: Tensor, rate: Tensor, slots: list[Any], options: Options) -> None:
        """Update one variable."""
        (decay, _), rate, (correction1, root2) = options, tf.cast(rate, tf.float64), self.corrections()
        if decay:
            w.assign_sub(w * tf.cast(rate * decay, w.dtype))
        # the operation corrects no bias when both powers are 0, and adds epsilon to the uncorrected
        # sqrt(v): with these values its formula is that of torch.optim.AdamW
        zero = tf.zeros((), w.dtype)
        tf.raw_ops.ResourceApplyAdam(
            var=w.handle,
            m=slots[0].handle,
            v=slots[1].handle,
            beta1_power=zero,
            beta2_power=zero,
            lr=tf.cast(rate * root2 / correction1, w.dtype),
            beta1=tf.constant(self.beta1, w.dtype),
            beta2=tf.constant(self.beta2, w.dtype),
            epsilon=tf.cast(self.epsilon * root2, w.dtype),
            grad=g,
        )


class LAMB(TwoMoments):
    """Adam with decoupled decay whose update is scaled to each parameter's norm; see ``torch/``."""

    def move(self, w: Variable, g: Tensor, rate: Tensor, slots: list[Any], options: Options) -> None:
        """Update one variable."""
        (decay, adapts), (m, v), (correction1, root2) = options, slots, self.corrections()
        first = m.assign_add((g - m) * (1 - self.beta1), read_value=True)
        second = v.assign(v * self.beta2 + g * g * (1 - self.beta2), read_value=True)
        scale = tf.sqrt(second) / tf.cast(root2, w.dtype) + self.epsilon
        update = first / (scale * tf.cast(correction1, w.dtype))
        if adapts:
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
    """Make the optimizer of a job; a built-in one has ``groups``, and ``slots`` by their portable names."""
    if hasattr(task, "tf_optimizer"):
        optimizer: keras.optimizers.Optimizer = task.tf_optimizer()
        check_own_optimizer(optimizer, keras.optimizers.Optimizer, "tf_optimizer", "a Keras optimizer")
        return optimizer
    kind, groups = config.optimizer, []
    for field in model.trainable_fields():
        own, adapts = options[field.name], kind in ("lars", "lamb") and is_matrix(field.path, field.shape)
        decay = own.weight_decay if adapts or kind in ("sgd", "adamw") else 0.0
        groups.append((own.factor, decay, adapts))
    if kind in ("adamw", "lamb"):
        moments = config.adam_beta1, config.adam_beta2, config.adam_epsilon
        return (AdamW if kind == "adamw" else LAMB)(*moments, groups, name=kind)
    return SGD(momentum=config.momentum, groups=groups, name=kind)


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
            f"Leave out use_ema, and set ema_decay: {inner.ema_momentum:g} in the config.",
        )
    # the shortest number that is the same in 32 bits: 0.001, not 0.0010000000474974513
    base = float(str(np.float32(inner._learning_rate.numpy())))
    check_positive(base, method)
    default = constructor_default(inner, "learning_rate")
    is_default = isinstance(default, int | float) and np.float32(default) == np.float32(base)
    return OwnRates(type(inner).__name__, base, bool(is_default))


def make_optimizers(
    task: Any, model: keras.Model, tensors: ModelState
) -> tuple[dict[str, keras.optimizers.Optimizer], dict[str, list[Field]]]:
    """Make the optimizers of a task that names several; return them, and the parameters that each trains."""
    method, given = "tf_optimizers", task.tf_optimizers(model)
    pairs = given if isinstance(given, Mapping) else {}
    for name, pair in pairs.items():
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], list | tuple)):
            raise TaskError(
                f"{method}(model) must give an optimizer and the list of the variables that it trains as "
                f"{name!r}, found a {type(pair).__name__}",
                f'Return {{"{name}": (keras.optimizers.Adam(1e-4), model.{name}.trainable_variables)}}.',
            )
    optimizers = {name: pair[0] for name, pair in pairs.items()} or given
    by_name = check_named_optimizers(optimizers, keras.optimizers.Optimizer, method)
    if len(set(map(id, by_name.values()))) < len(by_name):
        raise TaskError(f"{method}(model) gave one optimizer under two names", "Make one for each name.")
    known = {id(field.variable) for field in tensors.fields}
    fields = {id(field.variable): field for field in tensors.trainable_fields()}
    variables = {name: {id(v): v for v in pairs[name][1]} for name in by_name}
    owned = {name: [fields[i] for i in ids if i in fields] for name, ids in variables.items()}
    names = {name: [field.name for field in of_one] for name, of_one in owned.items()}
    foreign = {n: sum(v.trainable and i not in known for i, v in ids.items()) for n, ids in variables.items()}
    check_owners(method, [field.name for field in fields.values()], names, foreign)
    return by_name, owned
