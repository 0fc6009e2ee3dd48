"""Data and models that the jobs of all trainers share."""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

_PIXELS, _DIGITS = load_digits(return_X_y=True)
_PIXELS, _DIGITS = (_PIXELS / 16).astype("float32"), _DIGITS.astype("int64")
TRAIN = _PIXELS[:1439], _DIGITS[:1439]  # numbers of samples that two workers cannot share evenly
EVAL = _PIXELS[1439:], _DIGITS[1439:]
FOLDER = Path("first-jobs")


def torch_model(outputs: int = 10):
    """Return the model in PyTorch."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, outputs))


def keras_model(outputs: int = 10):
    """Return the model in Keras."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(outputs)]
    return keras.Sequential(layers)


def torch_sets():
    """Return the data as data sets of PyTorch."""
    import torch

    return [torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays)) for arrays in (TRAIN, EVAL)]


def picture(wrong: np.ndarray) -> np.ndarray:
    """Return the scans of wrong predictions side by side, as an image with values from 0 to 1."""
    return np.hstack([scan.reshape(8, 8) for scan in wrong[:16]]) if len(wrong) else np.zeros((8, 8))
