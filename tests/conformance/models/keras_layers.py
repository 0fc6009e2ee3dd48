"""Keras layers and ways of building a model."""

from conformance.zoo import Model, X


class OwnLayers(Model):
    """Layers that build their weights late, keep others in lists and dicts, and depend on the mode."""

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

        model = Tower()
        model(X[:1])
        return model


class UnnamedWeights(Model):
    """Weights of one layer with equal names, or with none, as ``add_weight`` allows."""

    def tf_model(self):
        import keras

        class Mixed(keras.layers.Layer):
            def build(self, shape):
                self.first = [self.add_weight(shape=(4, 3), name="kernel") for _ in range(2)]
                self.second = self.add_weight(shape=(4, 3), initializer="glorot_uniform")
                self.third = self.add_weight(shape=(3,), initializer="zeros")

            def call(self, inputs):
                return inputs @ (self.first[0] * self.second + self.first[1]) + self.third

        return keras.Sequential(
            [keras.Input((4,)), Mixed(), keras.layers.Activation("tanh"), keras.layers.Dense(3)]
        )
