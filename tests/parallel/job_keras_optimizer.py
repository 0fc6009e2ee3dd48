"""What test_keras_optimizer.py runs on two workers: Keras 3 optimizers on data that differs by worker.

Trains the same small model in several ways and writes the parameters of each to rank-R.npz.
"""

import os
from functools import partial

os.environ["KERAS_BACKEND"] = "tensorflow"

import horovod.keras as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.distributed_optimizer import DistributedOptimizer
from hvdtrain.backends.tensorflow.steps.optimizers import SGD

STEPS, SAMPLES, INPUTS = 5, 16, 4


def data(rank):
    random = np.random.RandomState(rank)
    return random.randn(SAMPLES, INPUTS).astype("float32"), random.randn(SAMPLES, 1).astype("float32")


def model():
    first, second = (keras.initializers.GlorotUniform(seed=seed) for seed in (1, 2))
    layers = [
        keras.layers.Dense(3, "tanh", kernel_initializer=first),
        keras.layers.Dense(1, kernel_initializer=second),
    ]
    return keras.Sequential([keras.Input((INPUTS,)), *layers])


def fit(optimizer, inputs, targets):
    trained = model()
    trained.compile(optimizer, "mse")
    trained.fit(inputs, targets, batch_size=len(inputs), epochs=STEPS, shuffle=False, verbose=0)
    return flat(trained)


def apply_eagerly(optimizer, inputs, targets):
    trained = model()
    variables = trained.trainable_variables
    optimizer.build(variables)
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((trained(inputs, training=True) - targets) ** 2)
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
    return flat(trained)


def flat(trained):
    return np.concatenate([v.numpy().ravel() for v in trained.trainable_variables])


def main():
    hvd.init()
    sgd, keras_sgd = (partial(kind, learning_rate=0.1, momentum=0.9) for kind in (SGD, keras.optimizers.SGD))
    rank, size = hvd.rank(), hvd.size()
    mine = data(rank)
    everything = [np.concatenate(parts) for parts in zip(*(data(r) for r in range(size)), strict=True)]
    found = {
        "alone": fit(sgd(), *mine),
        "together": fit(sgd(), *everything),
        "fit": fit(DistributedOptimizer(sgd()), *mine),
        "apply_eagerly": apply_eagerly(DistributedOptimizer(sgd()), *mine),
        "fp16": fit(DistributedOptimizer(sgd(), compression="fp16"), *mine),
        "keras_together": fit(keras_sgd(), *everything),
        "horovods": fit(hvd.DistributedOptimizer(keras_sgd()), *mine),
        "keras_alone": fit(keras_sgd(), *mine),
        "keras_fit": fit(DistributedOptimizer(keras_sgd()), *mine),
    }
    np.savez(f"rank-{rank}.npz", **found)
    hvd.shutdown()


main()
