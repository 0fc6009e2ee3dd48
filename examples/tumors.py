"""A custom task for both frameworks: is a breast tumour benign or malignant?

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/tumors.py:Tumors
    horovodrun -np 2 python -m hvdtrain --framework tf --task examples/tumors.py:Tumors

The data are 569 cases with 30 measurements of cell nuclei each, from scikit-learn. Source: W. Wolberg,
O. Mangasarian, N. Street and W. Street, "Breast Cancer Wisconsin (Diagnostic)", UCI Machine
Learning Repository, 1995.

No framework is imported at the top of the file, so a job loads only the framework that it uses.
"""

import numpy as np
from sklearn.datasets import load_breast_cancer

FEATURES, CLASSES = 30, 2


class Tumors:
    """Classify the cases with a small dense network.

    Args:
        hidden: width of the two hidden layers; set it with ``--set task_options.hidden=64``.
    """

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}
    # defaults of this task; a config file, --set and options override them
    defaults = {
        "epochs": 8,
        "batch_size": 16,
        "learning_rate": 0.02,
        "warmup_epochs": 1,
        "lr_schedule": "cosine",
        "weight_decay": 1e-3,
        "eval_every": "2epoch",
        "initial_parameters": "portable",  # drawn by name, so both frameworks start from equal values
    }

    def __init__(self, hidden=32):
        self.hidden = hidden
        features, labels = load_breast_cancer(return_X_y=True)
        # the same split and scale on every worker; nothing here may depend on the rank
        shuffled = np.random.RandomState(0).permutation(len(features))
        train, evaluation = shuffled[114:], shuffled[:114]
        mean, deviation = features[train].mean(0), features[train].std(0)
        features = (features - mean) / deviation
        self._train = features[train], labels[train]
        self._eval = features[evaluation], labels[evaluation]

    def train_data(self):
        return self._train  # a pair of arrays: inputs, targets

    def eval_data(self):
        return self._eval

    def torch_model(self):
        from collections import OrderedDict

        from torch import nn

        # the layers have the same names as in the Keras model
        return nn.Sequential(
            OrderedDict(
                dense1=nn.Linear(FEATURES, self.hidden),
                silu1=nn.SiLU(),
                dense2=nn.Linear(self.hidden, self.hidden),
                silu2=nn.SiLU(),
                logits=nn.Linear(self.hidden, CLASSES),
            )
        )

    def tf_model(self):
        import keras
        from keras import layers

        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                layers.Dense(self.hidden, activation="silu", name="dense1"),
                layers.Dense(self.hidden, activation="silu", name="dense2"),
                layers.Dense(CLASSES, name="logits"),
            ]
        )
