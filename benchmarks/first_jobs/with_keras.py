"""The jobs with Keras alone, which has one process here: python with_keras.py JOB."""

import sys

import common
import keras
import numpy as np
import tensorflow as tf


def compiled(outputs=10, optimizer=None, metrics=("accuracy",), **options):
    model = common.keras_model(outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1, 0.9), loss, metrics=list(metrics), **options)
    return model


def fit(model, epochs=5, **options):
    model.fit(*common.TRAIN, batch_size=32, epochs=epochs, validation_data=common.EVAL, verbose=2, **options)


def results(model):
    return model.evaluate(*common.EVAL, verbose=0, return_dict=True)


def train():
    model = compiled()
    fit(model)
    return results(model)


def f1():
    class F1(keras.metrics.F1Score):
        def update_state(self, targets, outputs, sample_weight=None):
            return super().update_state(
                keras.ops.one_hot(keras.ops.reshape(targets, [-1]), 10), outputs, sample_weight
            )

    model = compiled(metrics=[F1("macro")])
    fit(model)
    return results(model)


def schedule():
    steps = 5 * 45 // 2
    rates = keras.optimizers.schedules.CosineDecay(0.005, steps - 20, warmup_target=0.1, warmup_steps=20)
    optimizer = keras.optimizers.SGD(rates, 0.9, global_clipnorm=1.0, gradient_accumulation_steps=2)
    model = compiled(optimizer=optimizer)
    fit(model)
    return results(model)


def best():
    file = common.FOLDER / "best.keras"
    keep = keras.callbacks.ModelCheckpoint(file, "val_accuracy", save_best_only=True)
    fit(compiled(), callbacks=[keep])
    return results(keras.saving.load_model(file))


def resume():
    backup = keras.callbacks.BackupAndRestore(
        common.FOLDER / "backup", save_freq=100, delete_checkpoint=False
    )
    fit(compiled(), epochs=3, callbacks=[backup])
    model = compiled()
    fit(model, callbacks=[backup])
    return results(model)


def early_stopping():
    model = compiled()
    fit(model, epochs=50, callbacks=[keras.callbacks.EarlyStopping("val_accuracy", patience=2)])
    return {"steps": int(model.optimizer.iterations), **results(model)}


def class_weights():
    model = compiled()
    fit(model, class_weight={digit: 1.0 if digit < 5 else 2.0 for digit in range(10)})
    return results(model)


def average():
    model = compiled(optimizer=keras.optimizers.SGD(0.1, 0.9, use_ema=True, ema_momentum=0.95))
    fit(model)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return results(model)


def contrastive():
    class Contrastive(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = common.keras_model(16)

        def call(self, inputs):
            return self.body(inputs)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            embedded = keras.ops.normalize(y_pred, axis=1)
            noisy = keras.ops.normalize(self.body(x + 0.1), axis=1)
            logits = embedded @ keras.ops.transpose(noisy) / 0.1
            own = keras.ops.arange(keras.ops.shape(logits)[0])
            losses = keras.losses.sparse_categorical_crossentropy(own, logits, from_logits=True)
            return keras.ops.mean(losses)

    model = Contrastive()
    model.compile(keras.optimizers.SGD(0.1, 0.9))
    fit(model)
    return results(model)


def pictures():
    class Wrong(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            inputs, targets = common.EVAL
            wrong = self.model(inputs, training=False).numpy().argmax(1) != targets
            with writer.as_default():
                tf.summary.image("wrong", common.picture(inputs[wrong])[None, :, :, None], epoch)

    writer = tf.summary.create_file_writer(str(common.FOLDER / "pictures"))
    model = compiled()
    fit(model, callbacks=[Wrong()])
    return results(model)


def serve():
    model = compiled()
    fit(model)
    model.export(common.FOLDER / "model", verbose=False)
    outputs = model.predict(common.EVAL[0], verbose=0)
    return {"accuracy": float(np.mean(outputs.argmax(1) == common.EVAL[1]))}


JOBS = [
    train,
    f1,
    schedule,
    best,
    resume,
    early_stopping,
    class_weights,
    average,
    contrastive,
    pictures,
    serve,
]

if __name__ == "__main__":
    common.FOLDER.mkdir(exist_ok=True)
    print("result:", {job.__name__: job for job in JOBS}[sys.argv[1]]())
