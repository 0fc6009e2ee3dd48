"""Contrastive learning of pairs, as CLIP has it: its negatives are all other pairs of the global batch.

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/clip.py:Pairs

The pairs are generated: two views of hidden numbers, an "image" and a "text", each through a random matrix.
"""

import numpy as np

import hvdtrain

PAIRS, HIDDEN, IMAGE, TEXT, EMBEDDED = 2048, 8, 64, 32, 16
TEMPERATURE = 0.1


def pairs(count, seed):
    random, shared = np.random.RandomState(seed), np.random.RandomState(0)
    hidden = random.randn(count, HIDDEN)
    views = {
        name: np.tanh(hidden @ shared.randn(HIDDEN, size)) + 0.1 * random.randn(count, size)
        for name, size in (("image", IMAGE), ("text", TEXT))
    }
    return {name: view.astype(np.float32) for name, view in views.items()}


class Pairs:
    """Two towers, and the loss of CLIP (Radford et al. 2021)."""

    defaults = {
        "epochs": 5,
        "global_batch_size": 128,
        "optimizer": "adamw",
        "learning_rate": 0.003,
        "lr_scaling": "none",
    }

    def train_data(self):
        return pairs(PAIRS, seed=1)

    def eval_data(self):
        return pairs(256, seed=2)

    def torch_model(self):
        from torch import nn

        def tower(inputs):
            return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, EMBEDDED))

        return nn.ModuleDict({"image": tower(IMAGE), "text": tower(TEXT)})

    def torch_loss(self, model, batch):
        from torch.nn.functional import cross_entropy, normalize

        image, text = (normalize(model[name](batch[name]), dim=1) for name in ("image", "text"))
        images = hvdtrain.all_gather(image)
        texts, own = hvdtrain.all_gather(text, positions=True)
        to_text, to_image = image @ texts.T / TEMPERATURE, text @ images.T / TEMPERATURE
        losses = [cross_entropy(logits, own, reduction="none") for logits in (to_text, to_image)]
        return sum(losses) / 2, {"found": (to_text.argmax(1) == own).float()}

    def tf_model(self):
        import keras

        def tower(inputs):
            layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(EMBEDDED)]
            return keras.Sequential([*layers, keras.layers.UnitNormalization()])(inputs)

        inputs = [keras.Input((IMAGE,), name="image"), keras.Input((TEXT,), name="text")]
        return keras.Model(inputs, [tower(one) for one in inputs])

    def tf_loss(self, model, batch):
        import tensorflow as tf

        image, text = model([batch["image"], batch["text"]])
        images = hvdtrain.all_gather(image)
        texts, own = hvdtrain.all_gather(text, positions=True)
        to_text = tf.matmul(image, texts, transpose_b=True) / TEMPERATURE
        to_image = tf.matmul(text, images, transpose_b=True) / TEMPERATURE
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        losses = cross_entropy(own, to_text) + cross_entropy(own, to_image)
        found = tf.equal(tf.argmax(to_text, 1, tf.int32), own)
        return losses / 2, {"found": tf.cast(found, tf.float32)}
