"""What looks at a model and its steps without training it; ``torch/probes.py`` does the same for PyTorch."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from numpy.typing import NDArray
from tensorflow.python.eager import context as eager

from hvdtrain.backends.objective.evaluation_metrics import Seen
from hvdtrain.backends.objective.gathering import GivenArrays
from hvdtrain.backends.objective.gathering import find_comparing as find_comparing_values
from hvdtrain.backends.objective.logits import bad_target
from hvdtrain.backends.objective.losses import sample_values
from hvdtrain.backends.records import DryRun
from hvdtrain.backends.replica_state import Changes
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch
from hvdtrain.backends.tensorflow.computation import Computation
from hvdtrain.backends.tensorflow.functions import native, run_eagerly
from hvdtrain.backends.tensorflow.objective.losses import as_arrays, is_masked, masks_within
from hvdtrain.backends.workers import peer_errors
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import PeerLostError
from hvdtrain.workers.seeding import host_generators, seed_host_step

Layer = Any
Tensor = Any
Rows = Callable[[Any, Tensor, Tensor], Tensor]


class Recorder:
    """A model that keeps what its last call returned as arrays; calls in a graph are left out."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.outputs: Any = None
        self.is_masked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and keep what it returns."""
        outputs = self.model(*args, **kwargs)
        self.is_masked = is_masked(outputs)
        if tf.executing_eagerly():
            self.outputs = tf.nest.map_structure(as_array, outputs)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def as_array(value: Any) -> Any:
    """Return a tensor as an array, of half precision as fp32; another value as it is."""
    if not tf.is_tensor(value):
        return value
    return (tf.cast(value, tf.float32) if value.dtype in (tf.bfloat16, tf.float16) else value).numpy()


@contextmanager
def state_kept(model: Layer, others: Sequence[Any] = ()) -> Iterator[list[tuple[Any, Tensor]]]:
    """Return a context after which a model and the random generators of both libraries are as they were."""
    with tf.device("CPU"):
        before = [(variable, tf.identity(native(variable))) for variable in (*model.variables, *others)]
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    seeds = None if generator is None else generator.state.numpy()
    operations = eager.context()._rng.getstate()  # what random operations outside of a graph draw from
    try:
        yield before
    finally:
        for variable, value in before:
            variable.assign(value)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        if generator is not None:
            generator.state.assign(seeds)
        if eager.context()._rng.getstate() != operations:
            eager.context()._rng.setstate(operations)
            eager.context().clear_kernel_cache()  # random operations keep generators of their own there


def seed_operations(step: int) -> None:
    """Let random operations outside of a graph draw what belongs to a step; ``state_kept`` undoes it."""
    eager.context()._rng.seed(step)
    eager.context().clear_kernel_cache()


@contextmanager
def draws_noted(notes: list[str]) -> Iterator[None]:
    """Return a context that notes which generators are drawn from that a step cannot seed."""
    remedy = "use keras.random with seed=keras.random.SeedGenerator(...), an attribute of the model"
    host, operations = host_generators(), eager.context()._rng.getstate()
    yield
    if repr(host_generators()) != repr(host):
        notes.append(
            "model or loss draw from the generator of numpy or Python: a step is traced once, so but for "
            f"tf.numpy_function all steps have the same numbers; {remedy}"
        )
    if eager.context()._rng.getstate() != operations:
        notes.append(
            "model or loss draw from tf.random: a resumed run draws other numbers than the whole one; "
            f"{remedy}"
        )


def last_activation(model: Layer) -> str:
    """Return "softmax" or "sigmoid" if the model's last layer computes it; else nothing."""
    layers = getattr(model, "layers", [])
    last = layers[-1] if layers else None
    if isinstance(last, keras.Model):
        return last_activation(last)
    if isinstance(last, keras.layers.Softmax):
        return "softmax"
    name = getattr(getattr(last, "activation", None), "__name__", "")
    return name if name in {"softmax", "sigmoid"} else ""


def count_frozen(model: Layer) -> int:
    """Return the number of parameters that training does not change; moving statistics are none."""
    layers = {id(layer): layer for layer in model._flatten_layers()}.values()
    parameters = {id(v): v for layer in layers for v in layer._trainable_variables}
    trained = {id(v) for v in model.trainable_variables}
    return sum(math.prod(v.shape) for key, v in parameters.items() if key not in trained)


def dry_run(step: Any, state_tensors: Any, batch: HostBatch, training: bool) -> DryRun:
    """Collective. Compute the first micro-batch without changing state."""
    computation = step.computation
    called = computation.called
    recorder = computation.called = Recorder(called)
    values: dict[str, NDArray[Any]] = {}
    error, changes = None, Changes()
    draws: list[str] = []
    try:
        with peer_errors(), state_kept(computation.model) as kept:
            values = step.dry_run(computation.wrap(batch), training, draws)
            changes = state_tensors.changes(kept)
    except PeerLostError:
        raise
    except tf.errors.InvalidArgumentError as raised:
        error = bad_target(raised) or raised
    except Exception as raised:
        error = raised
    finally:
        computation.called = called
    notes = draws if training else []
    if recorder.is_masked and computation.is_own_loss:
        notes.append(
            "the model's outputs have a Keras mask, which fit() applies to losses and metrics; functions "
            "of your own apply it themselves: outputs._keras_mask"
        )
    last, note = last_activation(computation.model), "; ".join(filter(None, notes))
    metrics = {} if training else computation.evaluation.tried
    found = changes.crcs, changes.refusal, (), computation.weighted, metrics
    result = DryRun(recorder.outputs, values, last, error, note, *found)
    return step.completed(result, training)


def values_of_first(
    computation: Computation, batch: TensorFlowBatch, training: bool, draws: list[str], rows_of: Rows
) -> dict[str, NDArray[Any]]:
    """Return the loss and the metrics of a batch's first micro-batch, by name."""
    arrays, weights, gradient_weights = computation.counted(batch, training=training)
    seed_operations(batch.step)
    computation.set_seeds(computation.seeds(batch.step))

    def compute() -> tuple[Tensor, Seen]:
        rows = rows_of(arrays, weights, gradient_weights)
        return rows, computation.evaluation.take()

    # with collectives, the other workers are not going to compute it again
    gathering = computation.gathering
    gathering.is_used = False
    with draws_noted(draws):
        rows, seen = run_eagerly(compute, lambda: not (computation.has_collectives or gathering.is_used))
    if not training:
        seen = masks_within(*seen) if seen else seen
        computation.evaluation.try_out(seen, batch.samples.rows(0, len(weights)))
    return sample_values(computation.names, computation.weighted, rows.numpy(), weights.numpy())


def find_comparing(computation: Computation, batch: HostBatch, training: bool) -> str:
    """Collective. Return a sentence on how a value of a sample depends on other samples, or ""."""
    if computation.gathering.is_used:
        return ""
    arrays, weights, _ = computation.counted(computation.wrap(batch), training=training)
    objective = computation.train_objective if training else computation.eval_objective

    def values_of(rows: NDArray[np.int64], seed: int) -> GivenArrays:
        chosen, its_weights = tf.nest.map_structure(lambda a: tf.gather(a, rows), (arrays, weights))
        with state_kept(computation.model):
            seed_operations(seed)
            computation.set_seeds(computation.seeds(seed))
            seed_host_step(seed)
            given = computation.given(chosen, its_weights, False, objective)
        return {name: as_arrays(value) for name, value in given.items()}

    tolerance = 1e-4 if computation.precision == "fp32" else 3e-2
    with peer_errors():
        return find_comparing_values(values_of, len(weights), tolerance)
