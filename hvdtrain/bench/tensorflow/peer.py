"""Programs in TensorFlow that do a job's work: a plain loop, MultiWorkerMirroredStrategy, Horovod's tape."""

import json
import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"  # read when keras is imported
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.counting import Weighted
from hvdtrain.backends.objective import Objective, make_objective
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.tensorflow.device import use_device
from hvdtrain.backends.tensorflow.functions import Phase
from hvdtrain.backends.tensorflow.losses import NAMED
from hvdtrain.backends.tensorflow.model_state import ModelState
from hvdtrain.bench.peer import (
    LossOnly,
    Peer,
    Place,
    prepare_peer,
    run_steps,
    set_initial_values,
    workers_at,
)
from hvdtrain.config import Layer
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.seeding import seed_generators

Tensor = Any


def run_peer(program: str, layers: list[Layer], place: Place, steps: int) -> dict[str, Any] | None:
    """Collective. Train a job's model with another program; return what was measured on rank 0.

    Args:
        program: "plain", "mwms" or "horovod".
        layers: config values, weakest source first, without the task's defaults.
        place: which process this is; Horovod's program asks Horovod.
        steps: how many steps are timed.
    """
    open_peer = prepare_peer(layers)
    if program == "horovod":
        hvd.init()
        place = Place(hvd.rank(), hvd.size())
    peer = open_peer(place)
    use_device(peer.config, workers_at(place))
    strategy = _strategy(place) if program == "mwms" else None
    seed_generators(peer.config.seed, "model")
    keras.utils.set_random_seed(mix(peer.config.seed, 0) >> 33)  # as the trainer does
    model = peer.task.tf_model()
    set_initial_values(peer, ModelState(model, Renaming(peer.task, "tf")).fields)
    for i, state in enumerate(v for v in model.variables if v.name == "seed_generator_state"):
        key = mix(peer.config.seed, 0, place.rank, i)  # of the first step
        state.assign(np.asarray([key >> 32, 0], np.int64))
    objective = make_objective(LossOnly(peer.task), "tf", NAMED, peer.config.label_smoothing)
    optimizer = _optimizer(peer)
    optimizer.build(model.trainable_variables)
    if program == "horovod":
        hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
    loss_and_gradients = _gradients_of(model, objective, uses_horovod=program == "horovod")
    update = _update_of(peer, model, optimizer, _over_workers(loss_and_gradients, strategy))

    def step(batch: HostBatch) -> Tensor:
        return update({name: tf.constant(array[0]) for name, array in batch.arrays.items()})

    mean_of = _mean_of(program, strategy)
    found = run_steps(peer, step, lambda loss: float(loss.numpy()), mean_of, steps)
    return found if place.rank == 0 else None


def _strategy(place: Place) -> Any:
    """Return the strategy of the processes of this host."""
    workers = [f"localhost:{port}" for port in place.ports]
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place.rank}}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    return tf.distribute.MultiWorkerMirroredStrategy()


def _gradients_of(model: Any, objective: Objective, uses_horovod: bool) -> Callable[[Any], Any]:
    variables = [v.value for v in model.trainable_variables]

    def loss_and_gradients(batch: Any) -> tuple[Tensor, list[Tensor]]:
        with tf.GradientTape() as tape:
            losses, _ = objective(Phase(model, True), batch)
            if isinstance(losses, Weighted):
                loss = tf.reduce_sum(losses.values * losses.weights) / tf.reduce_sum(losses.weights)
            else:
                loss = tf.reduce_mean(losses)
            if model.losses:
                loss += tf.add_n(model.losses)
        if uses_horovod:
            tape = hvd.DistributedGradientTape(tape)
        return loss, tape.gradient(loss, variables)

    return loss_and_gradients


def _over_workers(loss_and_gradients: Callable[[Any], Any], strategy: Any) -> Callable[[Any], Any]:
    """Return a function whose gradients are the mean over the workers of a strategy.

    Keras's variables are not those of a strategy, so the mean is written out, in the replica's context.
    """
    if strategy is None:
        return loss_and_gradients

    def in_replica(batch: Any) -> tuple[Tensor, list[Tensor]]:
        loss, gradients = loss_and_gradients(batch)
        context = tf.distribute.get_replica_context()
        return loss, context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)

    return lambda batch: strategy.run(in_replica, args=(batch,))


def _update_of(
    peer: Peer, model: Any, optimizer: Any, loss_and_gradients: Callable[[Any], Any]
) -> Callable[[Any], Tensor]:
    clip_norm = peer.config.clip_norm

    def update(batch: Any) -> Tensor:
        loss, gradients = loss_and_gradients(batch)
        if clip_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, clip_norm)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    compiled: Callable[[Any], Tensor] = tf.function(update, autograph=False)
    return compiled


def _mean_of(program: str, strategy: Any) -> Callable[[float], float]:
    """Return what computes the mean of a number over the processes."""
    if program == "horovod":
        return lambda value: float(hvd.allreduce(tf.constant(value, tf.float64), name="bench.mean").numpy())
    if strategy is None:
        return float

    def in_replica(value: Tensor) -> Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.MEAN, tf.identity(value))

    compiled = tf.function(lambda value: strategy.run(in_replica, args=(value,)))
    return lambda value: float(compiled(tf.constant(value, tf.float64)).numpy())


def _optimizer(peer: Peer) -> Any:
    """Return the task's optimizer, or Keras's one of the config."""
    config = peer.config
    if hasattr(peer.task, "tf_optimizer"):
        return peer.task.tf_optimizer()
    decay = config.weight_decay or None
    if config.optimizer == "adamw":
        return keras.optimizers.AdamW(
            peer.learning_rate,
            weight_decay=decay,
            beta_1=config.adam_beta1,
            beta_2=config.adam_beta2,
            epsilon=config.adam_epsilon,
        )
    return keras.optimizers.SGD(peer.learning_rate, momentum=config.momentum, weight_decay=decay)
