"""Keras layers and ways of building a model."""

import numpy as np
from conformance.zoo import EVALUATED, SAMPLES, Judge, Model, X, Y

RANDOM = np.random.RandomState(3)
IMAGES = RANDOM.rand(SAMPLES, 6, 6, 2).astype(np.float32)


class OwnLayers(Model):
    """Layers that build their weights late, keep others in lists and dicts, and depend on the mode."""

    judge = Judge(workers=(1, 2))

    def tf_model(self):
        import keras

        class Scaled(keras.layers.Layer):
            def build(self, shape):
                self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
                self.inner = keras.layers.Dense(shape[-1])
                self.inner.build(shape)

            def call(self, inputs, training=False):
                return self.inner(inputs) * self.scale * (0.5 if training else 1.0)

        class Tower(keras.Model):
            def __init__(self):
                super().__init__()
                self.blocks = [keras.Sequential([Scaled(), keras.layers.ELU()]) for _ in range(2)]
                self.heads = {"a": keras.layers.Dense(3), "b": keras.layers.Dense(3)}

            def call(self, inputs, training=None):
                for block in self.blocks:
                    inputs = inputs + block(inputs, training=training)
                return self.heads["a"](inputs) + self.heads["b"](inputs)

        keras.utils.set_random_seed(0)
        model = Tower()
        model(X[:1])
        return model


class UnnamedWeights(Model):
    """Weights of one layer with equal names, or with none, as ``add_weight`` allows."""

    judge = Judge(workers=(1, 2))

    def tf_model(self):
        import keras

        class Mixed(keras.layers.Layer):
            def build(self, shape):
                self.first = [self.add_weight(shape=(4, 3), name="kernel") for _ in range(2)]
                self.second = self.add_weight(shape=(4, 3), initializer="glorot_uniform")
                self.third = self.add_weight(shape=(3,), initializer="zeros")

            def call(self, inputs):
                return inputs @ (self.first[0] * self.second + self.first[1]) + self.third

        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((4,)), Mixed(), keras.layers.Activation("tanh"), keras.layers.Dense(3)]
        )


class Transformer(Model):
    """Patches, attention with a mask, residuals, and a token of the class that is a weight."""

    judge = Judge(workers=(1, 2))

    def train_data(self):
        return IMAGES, Y

    def eval_data(self):
        return IMAGES[:EVALUATED], Y[:EVALUATED]

    def tf_model(self):
        import keras

        class ClassToken(keras.layers.Layer):
            def build(self, shape):
                self.token = self.add_weight(
                    shape=(1, 1, shape[-1]), initializer="random_normal", name="token"
                )

            def call(self, inputs):
                token = keras.ops.repeat(self.token, keras.ops.shape(inputs)[0], axis=0)
                return keras.ops.concatenate([token, inputs], axis=1)

        keras.utils.set_random_seed(0)
        layers = keras.layers
        inputs = keras.Input((6, 6, 2))
        x = layers.Reshape((9, 8))(layers.Conv2D(8, 2, strides=2)(inputs))
        x = ClassToken()(x)
        attended = layers.MultiHeadAttention(2, 4, dropout=0.0)(layers.LayerNormalization()(x), x)
        x = layers.Add()([x, layers.Dropout(0.0)(attended)])
        x = layers.Add()([x, layers.Dense(8, "gelu")(layers.GroupQueryAttention(4, 2, 1)(x, x))])
        return keras.Model(inputs, layers.Dense(3)(x[:, 0]))


class Lookups(Model):
    """Bins, crossings and rescaling before the trained layers; a lambda with a variable of a layer."""

    judge = Judge(workers=(1, 2))

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
        layers = keras.layers
        inputs = keras.Input((4,))
        bins = layers.Discretization([-1.0, 0.0, 1.0], output_mode="int")(inputs)
        embedded = layers.Flatten()(layers.Embedding(4, 2)(bins))
        scaled = layers.Rescaling(0.5, offset=1.0)(inputs)
        squared = layers.Lambda(lambda x: x**2, output_shape=(4,))(scaled)
        return keras.Model(inputs, layers.Dense(3)(layers.Concatenate()([embedded, squared])))
