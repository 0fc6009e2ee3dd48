"""Tasks whose labels are pure noise, so that an accuracy above 0.5 shows a leak; splits without a seed."""

import numpy as np

SAMPLES, EVALUATED, INPUTS = 400, 100, 16
_GENERATOR = np.random.default_rng(0)
X = _GENERATOR.normal(size=(SAMPLES, INPUTS)).astype("float32")
Y = _GENERATOR.integers(0, 2, SAMPLES)


class Noise:
    """Data in the order that ``order`` gives; the first of them are evaluated."""

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}  # noqa: RUF012
    defaults = {"epochs": 20, "batch_size": 16, "learning_rate": 0.05, "log_every": 1000}  # noqa: RUF012

    state_names = {"torch": {"0": "hidden", "2": "output"}}  # noqa: RUF012

    def __init__(self):
        self.indices = self.order()

    def train_data(self):
        chosen = self.indices[EVALUATED:]
        return X[chosen], Y[chosen]

    def eval_data(self):
        chosen = self.indices[:EVALUATED]
        return X[chosen], Y[chosen]

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, 2))

    def tf_model(self):
        import keras

        layers = [keras.layers.Dense(128, "relu", name="hidden"), keras.layers.Dense(2, name="output")]
        return keras.Sequential([keras.Input((INPUTS,)), *layers])


class Sklearn(Noise):
    """scikit-learn's split, which draws from numpy's global generator."""

    def order(self):
        from sklearn.model_selection import train_test_split

        train, evaluation = train_test_split(np.arange(SAMPLES), test_size=EVALUATED)
        return np.concatenate([evaluation, train])


class Torch(Noise):
    """PyTorch's split, which draws from its global generator, in either framework."""

    def order(self):
        from torch.utils.data import random_split

        train, evaluation = random_split(range(SAMPLES), [SAMPLES - EVALUATED, EVALUATED])
        return np.asarray([*evaluation.indices, *train.indices])


class TensorFlow(Noise):
    """TensorFlow's global generator, in either framework."""

    def order(self):
        import tensorflow as tf

        return tf.random.shuffle(tf.range(SAMPLES)).numpy()


class SetOrder(Noise):
    """The order of a set of texts, which depends on the hash seed of the process."""

    def order(self):
        return np.asarray([int(name[6:]) for name in {f"sample{index}" for index in range(SAMPLES)}])


class Unseeded(Noise):
    """A generator of its own without a seed."""

    def order(self):
        return np.random.default_rng().permutation(SAMPLES)
