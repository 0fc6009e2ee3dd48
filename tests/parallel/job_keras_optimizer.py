"""What test_keras_optimizer.py runs on two workers: Horovod's optimizer for Keras on other data each.

Trains the same small model in several ways and writes the parameters of each to rank-R.npz.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import horovod.keras as hvd
import keras
import numpy as np

STEPS, SAMPLES, INPUTS = 5, 16, 4


def fitted(optimizer, inputs, targets):
    layer = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2))
    model = keras.Sequential([keras.Input((INPUTS,)), layer])
    model.compile(optimizer, "mse")
    model.fit(inputs, targets, batch_size=len(inputs), epochs=STEPS, shuffle=False, verbose=0)
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def main():
    hvd.init()
    random = np.random.RandomState(hvd.rank())
    data = [random.randn(SAMPLES, size).astype("float32") for size in (INPUTS, 1)]
    alone, wrapped = (keras.optimizers.SGD(learning_rate=0.1, momentum=0.9) for _ in range(2))
    found = {
        "alone": fitted(alone, *data),
        "wrapped": fitted(hvd.DistributedOptimizer(wrapped), *data),
    }
    np.savez(f"rank-{hvd.rank()}.npz", **found)
    hvd.shutdown()


if __name__ == "__main__":
    main()
