"""A step of a task's own in TensorFlow, at one worker. Run in a pool; ``test_own_step.py`` does so."""

import numpy as np
import pytest
from own_step_tasks import Fit, Gan, Plain
from small_task import INPUTS, OUTPUTS
from support.suite import config, on_device, started_backend  # noqa: F401

from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError

SAMPLES = 12


def build(backend, task, **fields):
    backend.build(task, config(learning_rate=0.01, **fields))


def host_batch(task, step=0):
    data = task.train_data()
    named = data if isinstance(data, dict) else dict(zip(("inputs", "targets"), data, strict=True))
    arrays = {name: array[None, :SAMPLES] for name, array in named.items()}
    return HostBatch(step, arrays, np.ones((1, SAMPLES), np.float32), float(SAMPLES), np.arange(SAMPLES))


def train(backend, task, step=0):
    batch = on_device(backend, host_batch(task, step))
    return backend.train_step(batch, 0.01).read()


def stepping(function, base=Plain):
    """Give a task whose step is a function of (task, model, batch, optimizers)."""
    return type("Own", (base,), {"tf_step": function})()


def losses_of(model, batch):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        losses = tf.reduce_mean((model(batch["inputs"]) - batch["targets"]) ** 2, -1)
    return losses, tape


def no_tape(task, model, batch, optimizers):
    optimizers["main"].minimize(losses_of(model, batch)[0])


def outside_of_tape(task, model, batch, optimizers):
    losses, tape = losses_of(model, batch)
    optimizers["main"].minimize(losses * 2, tape)


def by_a_condition(task, model, batch, optimizers):
    import tensorflow as tf

    losses, tape = losses_of(model, batch)
    tf.cond(
        tf.reduce_mean(losses) > 0,
        lambda: optimizers["main"].gradients(losses, tape)[0],
        lambda: tf.zeros((INPUTS, OUTPUTS)),
    )


def by_a_tensor(task, model, batch, optimizers):
    losses, tape = losses_of(model, batch)
    if losses[0] > 0:
        optimizers["main"].minimize(losses, tape)
    return losses, {}


def at_random(task, model, batch, optimizers):
    import tensorflow as tf

    losses, tape = losses_of(model, {**batch, "inputs": batch["inputs"] + tf.random.normal((INPUTS,))})
    optimizers["main"].minimize(losses, tape)
    return losses, {}


def a_variable_of_its_own(task, model, batch, optimizers):
    import tensorflow as tf

    if not hasattr(task, "count"):
        task.count = tf.Variable(0.0, name="count")
    losses, _ = losses_of(model, batch)
    task.count.assign_add(1.0)
    return losses, {}


def by_the_number(task, model, batch, optimizers):
    losses, _ = losses_of(model, batch)
    list(range(optimizers.step))
    return losses, {}


def in_many_ways(task, model, batch, optimizers):
    losses, _ = losses_of(model, batch)
    any(optimizers.step == number for number in range(40))
    return losses, {}


def too_few_gradients(task, model, batch, optimizers):
    losses, tape = losses_of(model, batch)
    optimizers["main"].apply(optimizers["main"].gradients(losses, tape)[:1])


def wrong_name(task, model, batch, optimizers):
    optimizers["mian"].minimize(*losses_of(model, batch))


MISTAKES = {
    no_tape: "without the tape that recorded them",
    outside_of_tape: "depend on none of its parameters",
    by_a_condition: "inside of tf.cond, tf.while_loop or a tf.function",
    by_a_tensor: "tf_step decides in Python by a tensor",
    at_random: "tf_step draws random numbers with RandomStandardNormal",
    a_variable_of_its_own: "tf_step changes 'count.*', which is not a variable of the model",
    by_the_number: "optimizers.step is not an int",
    in_many_ways: "in more than 16 ways",
    too_few_gradients: "1 gradients for 2 variables",
    wrong_name: "there is no optimizer 'mian'",
}


@pytest.mark.parametrize("step", MISTAKES, ids=lambda step: step.__name__)
def test_mistakes_in_a_step_are_refused(started, step):
    task = stepping(step)
    build(started, task)
    with pytest.raises((TaskError, TypeError), match=MISTAKES[step]):
        [train(started, task, number) for number in range(17)]


def test_losses_of_the_model_must_be_read(started):
    import keras
    import tensorflow as tf

    class Regularized(Plain):
        def tf_model(self):
            inputs = keras.Input((INPUTS,))
            return keras.Model(inputs, keras.layers.Dense(OUTPUTS, kernel_regularizer="l2")(inputs))

    build(started, Regularized())
    with pytest.raises(TaskError, match="the model adds losses of its own"):
        train(started, Regularized())

    def reads(task, model, batch, optimizers):
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(model(batch["inputs"]) ** 2, -1) + tf.add_n(model.losses)
        optimizers["main"].minimize(losses, tape)
        return losses, {}

    task = stepping(reads, Regularized)
    build(started, task)
    assert train(started, task).mean("loss") > 0


@pytest.mark.parametrize(
    ("owners", "problem"),
    [
        (lambda adam, g: {"all": adam}, "must give an optimizer and the list of the variables"),
        (lambda adam, g: dict.fromkeys("gd", (adam, g)), "one optimizer under two names"),
    ],
)
def test_each_parameter_has_one_optimizer(started, owners, problem):
    import keras

    class Owned(Gan):
        def tf_optimizers(self, model):
            return owners(keras.optimizers.Adam(), model.generator.trainable_variables)

    with pytest.raises(TaskError, match=problem):
        started.build(Owned(), config())


def test_decisions_by_the_step_take_a_trace_for_each_answer_and_numbers_take_none(started):
    import tensorflow as tf

    traced = []

    def step(task, model, batch, optimizers):
        traced.append(None)
        losses, tape = losses_of(model, batch)
        if optimizers.step % 3 == 2:
            optimizers["main"].minimize(losses, tape)
        return losses, {"number": tf.zeros_like(losses) + optimizers.step / 10}

    task = stepping(step)
    build(started, task)
    found = [train(started, task, number) for number in range(8)]
    assert len(traced) == 2
    assert [round(10 * one.mean("number")) for one in found] == list(range(8))
    losses = [one.mean("loss") for one in found]
    assert losses[0] == losses[1] == losses[2] > losses[3] == losses[4] == losses[5] > losses[6] == losses[7]


def test_a_generator_of_the_model_draws_by_seed_and_step(started):
    import keras
    import tensorflow as tf

    class Drawing(Plain):
        def tf_model(self):
            model = super().tf_model()
            model.generator = keras.random.SeedGenerator(5)
            return model

        def tf_step(self, model, batch, optimizers):
            losses, tape = losses_of(model, batch)
            optimizers["main"].minimize(losses, tape)
            shape, seed = tf.shape(losses), model.generator
            return losses, {name: keras.random.uniform(shape, seed=seed) for name in ("drawn", "again")}

    found = []
    for numbers in ([0, 1, 2], [2]):  # the second run is one that was resumed
        build(started, Drawing())
        found.append([train(started, Drawing(), number) for number in numbers])
    drawn = [one.mean("drawn") for one in found[0]]
    assert len({*drawn, found[0][0].mean("again")}) == 4
    assert found[1][0].mean("drawn") == drawn[2]


class Dropping(Fit):
    """The part of a dropout's outputs that are kept as they were: in training none is."""

    def tf_model(self):
        import keras

        inputs = keras.Input((INPUTS,))
        dropped = keras.layers.Dropout(0.5, seed=1, name="drop")(inputs)
        return keras.Model(inputs, keras.layers.Dense(OUTPUTS)(dropped))

    def tf_loss(self, model, batch):
        import tensorflow as tf

        ones, drop = tf.ones_like(batch["inputs"]), model.get_layer("drop")
        kept = {"as_step": drop(ones), "asked_not_to": drop(ones, training=False)}
        losses, _ = losses_of(model, batch)
        return losses, {name: tf.reduce_mean(tf.cast(x == 1, tf.float32), -1) for name, x in kept.items()}


class DroppingStep(Dropping, Plain):
    """The same in a step."""


@pytest.mark.parametrize("task", [Dropping(), DroppingStep()], ids=["loss", "step"])
def test_parts_of_the_model_are_in_training_when_the_step_is(started, task):
    build(started, task)
    found = train(started, task)
    assert found.mean("as_step") == 0
    assert found.mean("asked_not_to") == 1
    batch = on_device(started, host_batch(task))
    evaluated = started.eval_metrics(started.eval_step(batch)).read()
    assert evaluated.mean("as_step") == 1
