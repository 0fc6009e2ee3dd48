"""Several labels for one sample, as topics of a text: F1 and the area under the ROC curve.

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/multi_label.py:Topics
    horovodrun -np 2 python -m hvdtrain --framework tf --task examples/multi_label.py:Topics

The data are made by scikit-learn: counts of 40 words in texts about any of 5 topics.
"""

import numpy as np
from sklearn.datasets import make_multilabel_classification

WORDS, TOPICS = 40, 5


class Topics:
    """Tell the topics of texts with a small dense network.

    Args:
        samples: number of texts, of which a fifth is for evaluation.
        hidden: width of the hidden layer.
    """

    loss = "binary_cross_entropy"  # of logits, one for each label
    # all three are computed from the whole evaluation data: means over the labels
    metrics = {"f1": "f1", "recall": "recall", "auc": "auc", "accuracy": "binary_accuracy"}
    defaults = {
        "epochs": 6,
        "global_batch_size": 64,
        "learning_rate": 0.02,
        "lr_schedule": "cosine",
        "eval_every": "2epoch",
        "keep_best": "f1",
        "initial_parameters": "portable",
    }

    def __init__(self, samples=2000, hidden=32):
        self.hidden = hidden
        counts, labels = make_multilabel_classification(
            samples, n_features=WORDS, n_classes=TOPICS, n_labels=2, length=60, random_state=0
        )
        inputs, labels = np.sqrt(counts).astype("float32"), labels.astype("float32")
        inputs -= inputs.mean(0)
        first = samples // 5
        self._train, self._eval = (inputs[first:], labels[first:]), (inputs[:first], labels[:first])

    def train_data(self):
        return self._train

    def eval_data(self):
        return self._eval

    def torch_model(self):
        from collections import OrderedDict

        from torch import nn

        return nn.Sequential(
            OrderedDict(
                dense=nn.Linear(WORDS, self.hidden), silu=nn.SiLU(), logits=nn.Linear(self.hidden, TOPICS)
            )
        )

    def tf_model(self):
        import keras
        from keras import layers

        return keras.Sequential(
            [
                keras.Input((WORDS,)),
                layers.Dense(self.hidden, activation="silu", name="dense"),
                layers.Dense(TOPICS, name="logits"),
            ]
        )
