"""What the models of the zoo share: small data, what is expected of a job, and the plain loop that judges it.

A file in ``models/`` has classes derived from ``Model``, which are tasks as users write them. The plain loop
calls the task's own model and loss on the whole batch, without anything of hvdtrain's.
"""

import functools
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 25  # two or three workers have unequal parts
EVALUATED = 11
STEPS = 4
RANDOM = np.random.RandomState(0)
X = RANDOM.randn(SAMPLES, 4).astype(np.float32)
Y = RANDOM.randint(0, 3, SAMPLES)
GRADIENT_DESCENT = {
    "steps": STEPS,
    "global_batch_size": SAMPLES,
    "eval_batch_size": 4,
    "learning_rate": 0.1,
    "momentum": 0.0,
    "log_every": 1,
    "eval_every": 2,
    "save_every": 2,
}

DECAYED = {**GRADIENT_DESCENT, "weight_decay": 0.1, "momentum": 0.9}


@dataclass(frozen=True)
class Judge:
    """What is expected of the jobs of a model.

    Attributes:
        frameworks: those in which it is tried; those that it has a model for if empty.
        workers: how many workers train the first two steps, and how many resume the job; a refusal is met by
            the first number of them.
        refused: what the refusal says; empty if the job trains.
        noted: what the plan or a note says.
        rtol: by how much values may differ from the plain loop's, relatively.
        options: more options of the command line.
        draws: whether it draws random numbers, of which a plain loop has others: the judge is a whole job.
    """

    frameworks: tuple[str, ...] = ()
    workers: tuple[int, ...] = (1, 2)
    refused: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()
    rtol: float = 2e-5
    options: tuple[str, ...] = ()
    draws: bool = False


class Model:
    """A task of the zoo: full-batch gradient descent on 25 samples of three classes."""

    judge = Judge()
    loss: Any = "cross_entropy"
    defaults: Mapping[str, Any] = GRADIENT_DESCENT

    def __init_subclass__(cls) -> None:
        """Let the models be made from a seed: the job's and the plain loop's are the same."""
        for framework in ("torch", "tf"):
            if make := vars(cls).get(f"{framework}_model"):
                setattr(cls, f"{framework}_model", _seeded(make, framework))

    def data(self, rows: Any) -> Any:
        """Return some samples."""
        return X[rows], Y[rows]

    def train_data(self) -> Any:
        """Return all samples."""
        return self.data(slice(None))

    def eval_data(self) -> Any:
        """Return the first samples, in another order."""
        return self.data(np.arange(EVALUATED)[::-1])

    def plain_outputs(self, model: Any, inputs: Any) -> Any:
        """Return what the plain loop calls the model for."""
        return model(inputs)

    def after_step(self, model: Any, step: int) -> None:
        """Do in the plain loop what a callback of the task does after a step, counted from 1."""

    @classmethod
    def frameworks(cls) -> tuple[str, ...]:
        """Return the frameworks in which the model is tried."""
        return cls.judge.frameworks or tuple(f for f in ("torch", "tf") if hasattr(cls, f"{f}_model"))


def _seeded(make: Any, framework: str) -> Any:
    @functools.wraps(make)
    def make_from_seed(*args: Any) -> Any:
        if framework == "torch":
            import torch

            torch.manual_seed(0)
        else:
            import keras

            keras.utils.set_random_seed(0)
        return make(*args)

    return make_from_seed


def module(forward: Any, **parts: Any) -> Any:
    """Return a module of PyTorch with these parts, of which tensors are buffers, and this forward pass."""
    import torch

    made = type("Net", (torch.nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        is_buffer = isinstance(part, torch.Tensor) and not isinstance(part, torch.nn.Parameter)
        (made.register_buffer if is_buffer else made.__setattr__)(name, part)
    return made


def torch_classifier(_: Any = None) -> Any:
    """Return a small model of PyTorch of three classes."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def tf_classifier(_: Any = None) -> Any:
    """Return a small Keras model of three classes."""
    import keras

    layers = [keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential(layers)


def judged(path: str, name: str, framework: str) -> dict[str, list[float]]:
    """Return what the plain loop computes for a model of a file; a case of a pool of one worker."""
    if framework == "tf":  # the threads of the pool's jobs, which cannot change later
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    return plain_loop(load_models(Path(path))[name](), framework)


def load_models(path: Path) -> dict[str, type[Model]]:
    """Return the models that a file defines, by name."""
    spec = importlib.util.spec_from_file_location(f"zoo_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
        and issubclass(kind, Model)
        and kind.__module__ == module.__name__
        and kind.frameworks()
    }


def plain_loop(task: Model, framework: str) -> dict[str, list[float]]:
    """Return the losses of the steps and of the evaluations, computed in one process on whole batches."""
    loop = {"torch": _torch_loop, "tf": _tf_loop}[framework]
    found = dict(loop(task))
    steps = int(task.defaults["steps"])
    return {
        "train": [found["train", step] for step in range(1, steps + 1)],
        "eval": [found["eval", step] for step in range(2, steps + 1, 2) if ("eval", step) in found],
    }


def _torch_loop(task: Any) -> Iterator[tuple[tuple[str, int], float]]:
    import torch

    model = task.torch_model()
    batch, evaluated = (_batch(data, torch.as_tensor) for data in (task.train_data(), task.eval_data()))
    parameters = [*model.parameters()]
    loss_object = getattr(task, "torch_loss", task.loss)
    if isinstance(loss_object, torch.nn.Module):
        parameters += loss_object.parameters()
    if hasattr(task, "torch_optimizer"):
        optimizer = task.torch_optimizer(parameters)
    else:
        optimizer = torch.optim.SGD(
            parameters,
            task.defaults["learning_rate"],
            momentum=task.defaults["momentum"],
            weight_decay=task.defaults.get("weight_decay", 0.0),
        )
    for step in range(1, int(task.defaults["steps"]) + 1):
        model.train()
        optimizer.zero_grad()
        loss = _torch_loss(task, model, batch)
        loss.backward()
        optimizer.step()
        task.after_step(model, step)
        yield ("train", step), float(loss.detach())
        if step % 2 == 0 and evaluated is not None:
            model.eval()
            with torch.no_grad():
                yield ("eval", step), float(_torch_loss(task, model, evaluated))


def _torch_loss(task: Any, model: Any, batch: Mapping[str, Any]) -> Any:
    import torch
    from torch.nn import functional

    if hasattr(task, "torch_loss"):
        losses, _ = task.torch_loss(model, batch)
    else:
        outputs = task.plain_outputs(model, batch["inputs"])
        named = {
            "cross_entropy": functional.cross_entropy,
            "binary_cross_entropy": functional.binary_cross_entropy_with_logits,
            "mse": functional.mse_loss,
            "mae": functional.l1_loss,
        }
        is_named = isinstance(task.loss, str)
        reduction = "none" if "weights" in batch else "mean"
        losses = (
            named[task.loss](outputs, batch["targets"], reduction=reduction)
            if is_named
            else task.loss(outputs, batch)
        )
    return _mean(losses, batch, torch.sum)


def _tf_loop(task: Any) -> Iterator[tuple[tuple[str, int], float]]:
    import keras
    import tensorflow as tf

    model = task.tf_model()
    batch, evaluated = (_batch(data, tf.convert_to_tensor) for data in (task.train_data(), task.eval_data()))
    if hasattr(task, "tf_optimizer"):
        optimizer = task.tf_optimizer()
    else:
        optimizer = keras.optimizers.SGD(task.defaults["learning_rate"], task.defaults["momentum"])
    if model.dtype_policy.name == "mixed_float16":  # as compile() does
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    layers = {id(layer): layer for layer in model._flatten_layers()}.values()
    loss_object = getattr(task, "tf_loss", task.loss)
    held = {} if isinstance(loss_object, str) else vars(loss_object)
    of_loss = [value for value in held.values() if isinstance(value, keras.Variable)]
    # of what may be thawed later, too
    thawed = [v for layer in layers for v in layer._trainable_variables]
    optimizer.build(list({id(v): v for v in (*thawed, *of_loss)}.values()))
    for step in range(1, int(task.defaults["steps"]) + 1):
        with tf.GradientTape() as tape:
            loss = _tf_loss(task, model, batch, training=True)
            scaled = optimizer.scale_loss(loss)
        variables = [*model.trainable_variables, *of_loss]
        decay = 0.0 if hasattr(task, "tf_optimizer") else task.defaults.get("weight_decay", 0.0)
        pairs = zip(tape.gradient(scaled, variables), variables, strict=True)
        decayed = [(g + decay * v if decay else g, v) for g, v in pairs if g is not None]
        optimizer.apply_gradients(decayed)
        task.after_step(model, step)
        yield ("train", step), float(loss)
        if step % 2 == 0 and evaluated is not None:
            yield ("eval", step), float(_tf_loss(task, model, evaluated, training=False))


def _tf_loss(task: Any, model: Any, batch: Mapping[str, Any], training: bool) -> Any:
    """Return what ``fit`` and ``evaluate`` of Keras call the loss: with what the model adds."""
    import tensorflow as tf

    loss = _tf_mean(task, model, batch, training)
    return loss + tf.cast(tf.add_n(model.losses), loss.dtype) if model.losses else loss


def _tf_mean(task: Any, model: Any, batch: Mapping[str, Any], training: bool) -> Any:
    import keras
    import tensorflow as tf

    if hasattr(task, "tf_loss"):
        call = getattr(task.tf_loss, "call", task.tf_loss)
        losses, _ = call(_Called(model, training), batch)
        return _mean(losses, batch, tf.reduce_sum)
    outputs, targets = model(batch["inputs"], training=training), batch["targets"]
    named = {
        "cross_entropy": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None),
        "binary_cross_entropy": keras.losses.BinaryCrossentropy(from_logits=True, reduction=None),
        "mse": keras.losses.MeanSquaredError(reduction=None),
        "mae": keras.losses.MeanAbsoluteError(reduction=None),
    }
    kept = named[task.loss] if isinstance(task.loss, str) else task.loss
    if isinstance(kept, keras.losses.Loss):
        mask = getattr(outputs, "_keras_mask", None)
        losses = kept.call(targets, outputs) if mask is None else kept(targets, outputs)
        if mask is not None:  # fit's mean is that of the places that count
            return tf.reduce_sum(losses) / tf.reduce_sum(tf.cast(mask, losses.dtype))
    else:
        losses = kept(outputs, batch)
    samples = tf.reduce_mean(tf.reshape(losses, (len(targets), -1)), axis=1) if losses.shape else losses
    return _mean(samples, batch, tf.reduce_sum)


class _Called:
    """A Keras model that is called in one mode, as a task's own loss calls it."""

    def __init__(self, model: Any, training: bool) -> None:
        self._model, self._training = model, training

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self._model(*inputs, **{"training": self._training, **options})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _mean(losses: Any, batch: Mapping[str, Any], total: Any) -> Any:
    """Return the mean of losses over samples, by their weights if they have any.

    Args:
        losses: one for each sample; or the mean; each of them alone or as ``hvdtrain.Weighted``.
        batch: the samples.
        total: a function that sums an array.
    """
    losses, weights = losses if isinstance(losses, tuple) else (losses, batch.get("weights"))
    if not losses.shape:
        return losses
    return total(losses) / len(losses) if weights is None else total(losses * weights) / total(weights)


def _batch(data: Any, convert: Any) -> dict[str, Any] | None:
    """Return a data set as one batch."""
    if data is None:
        return None
    named = data if isinstance(data, Mapping) else dict(zip(("inputs", "targets"), data, strict=False))
    return {name: _converted(array, convert) for name, array in named.items()}


def _converted(array: Any, convert: Any) -> Any:
    if isinstance(array, Mapping):
        return {key: convert(value) for key, value in array.items()}
    if isinstance(array, np.recarray):
        array = np.stack([array[column] for column in sorted(array.dtype.names)], 1)
    return tuple(map(convert, array)) if isinstance(array, tuple) else convert(array)
