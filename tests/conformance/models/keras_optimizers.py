"""Keras optimizers that divide gradients, and models for which ``model.fit`` scales losses."""

from conformance.zoo import Judge, Model, tf_classifier


class LossScale(Model):
    """An optimizer that scales losses dynamically."""

    tf_model = tf_classifier

    def tf_optimizer(self):
        import keras

        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))


class LossScaleFactor(Model):
    """An optimizer that divides gradients by a number of its own, and clips them."""

    tf_model = tf_classifier

    def tf_optimizer(self):
        import keras

        return keras.optimizers.SGD(0.1, loss_scale_factor=1024.0, global_clipnorm=0.1)


class LossScaleInOwnStep(LossScale):
    """A training step of the task's own."""

    def tf_step(self, model, batch, optimizers):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            outputs = model(batch["inputs"])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["targets"], outputs)
        optimizers["main"].minimize(losses, tape)
        return losses, {}


class MixedFloat16(Model):
    """Layers whose policy is mixed_float16."""

    judge = Judge(rtol=1e-3)

    def tf_model(self):
        import keras

        keras.config.set_dtype_policy("mixed_float16")
        model = tf_classifier(self)
        keras.config.set_dtype_policy("float32")
        return model


class MixedFloat16InOwnStep(MixedFloat16):
    """Nothing scales the losses."""

    judge = Judge(workers=(1, 2), refused=("nothing scales the losses of tf_step", "ScaleOptimizer(Adam("))
    tf_step = LossScaleInOwnStep.tf_step

    def tf_optimizer(self):
        import keras

        return keras.optimizers.Adam(0.1)


class MovingAverage(Model):
    """An optimizer whose moving average only ``model.fit`` puts into the model."""

    judge = Judge(workers=(1, 2), refused=("use_ema=True", "set ema_decay: 0.9 in the config"))
    tf_model = tf_classifier

    def tf_optimizer(self):
        import keras

        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)


class SynchronizedBatchNorm(Model):
    """Batch norm over all workers, without the option."""

    def tf_model(self):
        import keras

        norm = keras.layers.BatchNormalization(synchronized=True)
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), norm, keras.layers.Dense(3)])
