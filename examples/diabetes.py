"""Regression on a table: how far does a disease progress within a year? Measured by R2.

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/diabetes.py:Diabetes
    horovodrun -np 2 python -m hvdtrain --framework tf --task examples/diabetes.py:Diabetes

Your own table is a CSV file with a line of names and a number in every cell:

    ... --set task_options.csv=houses.csv --set task_options.target=price

The default table has 442 patients with 10 measurements each, from scikit-learn. Source: B. Efron, T. Hastie,
I. Johnstone and R. Tibshirani, "Least Angle Regression", Annals of Statistics, 2004.
"""

import csv

import numpy as np
from sklearn.datasets import load_diabetes


class Diabetes:
    """Predict one column of a table from the others with a small dense network.

    Args:
        csv: the file; the patients of scikit-learn if not given.
        target: name of the column to predict.
        hidden: width of the hidden layer.
    """

    loss = "mse"  # of targets that are scaled to a deviation of 1
    defaults = {
        "epochs": 10,
        "global_batch_size": 32,
        "learning_rate": 0.02,
        "lr_schedule": "cosine",
        "weight_decay": 1e-3,
        "eval_every": "2epoch",
        "keep_best": "r2",
        "initial_parameters": "portable",
    }

    def __init__(self, csv=None, target="target", hidden=16):
        self.hidden = hidden
        table = read_table(csv) if csv else patients()
        if target not in table or len(table) < 2:
            raise ValueError(f"there is no column {target!r}; the table has {', '.join(table)}")
        values = table.pop(target)[:, None]
        inputs = np.stack(list(table.values()), 1)
        # the same split on every worker; the scale is that of the training part alone
        shuffled = np.random.RandomState(0).permutation(len(values))
        evaluation, train = np.split(shuffled, [max(2, len(values) // 4)])
        inputs, _ = scaled(inputs, train)
        targets, deviation = scaled(values, train)
        self.features = inputs.shape[1]
        self._train = inputs[train], targets[train]
        self._eval = inputs[evaluation], targets[evaluation]
        # R2 needs the whole evaluation data; the error of each sample is in the units of the column
        self.metrics = {
            "r2": "r2",
            "mae": lambda outputs, batch: abs(outputs - batch["targets"])[:, 0] * float(deviation[0]),
        }

    def train_data(self):
        return self._train

    def eval_data(self):
        return self._eval

    def torch_model(self):
        from collections import OrderedDict

        from torch import nn

        return nn.Sequential(
            OrderedDict(
                dense=nn.Linear(self.features, self.hidden), silu=nn.SiLU(), value=nn.Linear(self.hidden, 1)
            )
        )

    def tf_model(self):
        import keras
        from keras import layers

        return keras.Sequential(
            [
                keras.Input((self.features,)),
                layers.Dense(self.hidden, activation="silu", name="dense"),
                layers.Dense(1, name="value"),
            ]
        )


def patients():
    """Return scikit-learn's table as columns by name."""
    data = load_diabetes(scaled=False)
    return {**dict(zip(data.feature_names, data.data.T, strict=True)), "target": data.target}


def read_table(path):
    """Return the columns of a CSV file by name.

    Raises:
        ValueError: naming the line and the column of a cell that is not a finite number.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, restkey="", restval="")
        lines = list(reader)
        names = reader.fieldnames or []
    columns = {name: np.empty(len(lines)) for name in names}
    for number, line in enumerate(lines):
        for name, cell in line.items():
            try:
                columns[name][number] = float(cell)
            except (KeyError, TypeError, ValueError):
                raise ValueError(
                    f"{path}, line {number + 2}, column {name!r}: {cell!r} is no number"
                ) from None
            if not np.isfinite(columns[name][number]):
                raise ValueError(f"{path}, line {number + 2}, column {name!r}: {cell!r} is not finite")
    return columns


def scaled(values, train):
    """Return values with a mean of 0 and a deviation of 1 in the training part, and the deviation."""
    deviation = values[train].std(0)
    deviation[deviation == 0] = 1.0
    return ((values - values[train].mean(0)) / deviation).astype("float32"), deviation
