"""State that no optimizer updates: what training changes, how it is combined, and what stays as it is."""

from collections.abc import Mapping

from conformance.zoo import GRADIENT_DESCENT, RANDOM, Judge, Model, X, Y, module

EVEN = 24  # of which two or three workers have equal parts, without padding
EXCEEDED = float(sorted(abs(X).max(1))[-2])  # by one sample
TABLE = RANDOM.randn(4, 5).astype("float32")


class Even(Model):
    """As many samples for each worker."""

    defaults: Mapping[str, object] = {**GRADIENT_DESCENT, "global_batch_size": EVEN}

    def train_data(self):
        return X[:EVEN], Y[:EVEN]


class Observer(Model):
    """The largest input, by which an evaluation divides; the buffer is replaced in each forward pass."""

    state_reductions: Mapping[str, str] = {"*.peak": "max"}

    def torch_model(self):
        import torch

        def forward(self, x):
            if self.training:
                self.peak = torch.maximum(self.peak, x.detach().abs().max())
                return self.linear(x)
            return self.linear(x / self.peak)

        return module(forward, linear=torch.nn.Linear(4, 3), peak=torch.zeros(()))

    def tf_model(self):
        import keras

        @keras.saving.register_keras_serializable("zoo")
        class Scaled(keras.layers.Layer):
            def build(self, _):
                self.peak = self.add_weight(shape=(), initializer="zeros", trainable=False, name="peak")

            def call(self, x, training=False):
                if training:
                    self.peak.assign(keras.ops.maximum(self.peak, keras.ops.max(keras.ops.abs(x))))
                    return x
                return x / self.peak

        return keras.Sequential([keras.Input((4,)), Scaled(), keras.layers.Dense(3)])


class Counter(Even):
    """The number of samples seen, in which an evaluation ends up."""

    state_reductions: Mapping[str, str] = {"*.seen": "max"}
    judge = Judge(workers=(1,))

    def torch_model(self):
        import torch

        def forward(self, x):
            if self.training:
                self.seen += len(x)
                return self.linear(x)
            return self.linear(x * self.seen / 100)

        return module(forward, linear=torch.nn.Linear(4, 3), seen=torch.zeros((), dtype=torch.long))

    def tf_model(self):
        import keras

        class Counted(keras.layers.Layer):
            def build(self, _):
                self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

            def call(self, x, training=False):
                if training:
                    self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
                    return x
                return x * self.seen / 100

        return keras.Sequential([keras.Input((4,)), Counted(), keras.layers.Dense(3)])


class Mean(Even):
    """A mean of the inputs that moves, in a layer that is no batch norm."""

    state_reductions: Mapping[str, str] = {"*.mean": "mean"}
    judge = Judge(workers=(3,))

    def torch_model(self):
        import torch

        def forward(self, x):
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.1)
                return self.linear(x)
            return self.linear(x - self.mean)

        return module(forward, linear=torch.nn.Linear(4, 3), mean=torch.zeros(4))


class Queue(Even):
    """A queue of inputs and a pointer into it: each worker has its own. Neither is in the loss."""

    judge = Judge(
        workers=(2,),
        noted=("queue: each worker has its own; rank 0's is saved, as DistributedDataParallel has it",),
    )

    def torch_model(self):
        import torch

        def forward(self, x):
            if self.training:
                self.queue = torch.cat([x.detach(), self.queue])[:EVEN]
            return self.linear(x)

        return module(forward, linear=torch.nn.Linear(4, 3), queue=torch.zeros(EVEN, 4))

    def tf_model(self):
        import keras

        class Kept(keras.layers.Layer):
            def build(self, _):
                self.queue = self.add_weight(shape=(4,), initializer="zeros", trainable=False, name="queue")

            def call(self, x, training=False):
                if training:
                    self.queue.assign(x[0])
                return x

        return keras.Sequential([keras.Input((4,)), Kept(), keras.layers.Dense(3)])


class Table(Model):
    """A table in a buffer, or a frozen layer, which training does not change."""

    def torch_model(self):
        import torch

        def forward(self, x):
            return self.head(x @ self.table)

        return module(forward, table=torch.from_numpy(TABLE), head=torch.nn.Linear(5, 3))

    def tf_model(self):
        import keras

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(3)])
        model.layers[0].trainable = False
        return model


class Growing(Model):
    """A buffer that grows: its last shape is not known before training."""

    judge = Judge(workers=(1, 2), refused=("replaces the buffer kept, float32 (0, 4), by one that is",))

    def torch_model(self):
        import torch

        def forward(self, x):
            self.kept = torch.cat([self.kept, x.detach()])
            return self.linear(x)

        return module(forward, linear=torch.nn.Linear(4, 3), kept=torch.zeros(0, 4))


class GrowingCache(Model):
    """A table that is not saved, which the rank with the largest input makes larger than others do."""

    judge = Judge(workers=(2,))

    def torch_model(self):
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(4, 3)
                self.register_buffer("table", torch.arange(6.0), persistent=False)

            def forward(self, x):
                places = (10 * x.abs()).long()
                if x.abs().max() > EXCEEDED:
                    self.register_buffer("table", torch.arange(9.0), persistent=False)
                return self.linear(x + 0.01 * self.table[places.clamp(max=5)])

        return Net()


class WrongPattern(Observer):
    """A pattern that matches a trained parameter alone."""

    state_reductions: Mapping[str, str] = {"linear.*": "mean", "dense.*": "mean"}
    judge = Judge(
        workers=(2,), refused=("the pattern 'linear.*' matches no state other than the trained parameters",)
    )


class NoMean(Counter):
    """A mean of integers."""

    tf_model = None
    state_reductions: Mapping[str, str] = {"seen": "mean"}
    judge = Judge(("torch",), (2,), ("model/seen has integers, of which there is no 'mean'",))


class LateProjector(Model):
    """A projector that the first forward pass makes, or a layer that only training calls."""

    judge = Judge(workers=(1, 2), refused=("only when it is called in a step", "Make it in"))

    def torch_model(self):
        import torch

        def forward(self, x):
            if not hasattr(self, "projector"):
                self.projector = torch.nn.Linear(3, 3)
            return self.projector(self.linear(x))

        return module(forward, linear=torch.nn.Linear(4, 3))

    def tf_model(self):
        import keras

        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense, self.extra = keras.layers.Dense(3), keras.layers.Dense(3)

            def call(self, x, training=False):
                return self.extra(self.dense(x)) if training else self.dense(x)

        model = Net()
        model(X[:2])
        return model


class ReplacedByOneWorker(Even):
    """A buffer that has another shape on one worker after some steps: all workers end, and none waits."""

    judge = Judge(frameworks=("torch",), workers=(2,), refused=("replaces the buffer last", "(4,)"))

    def torch_model(self):
        import torch

        first = torch.from_numpy(X[:1])

        def forward(self, x):
            if self.training:
                self.calls += 1
                if self.calls == 2 and (x == first).all(1).any():  # of one of the workers
                    self.last = torch.zeros(4)
            return self.linear(x)

        return module(
            forward,
            linear=torch.nn.Linear(4, 3),
            last=torch.zeros(3),
            calls=torch.zeros((), dtype=torch.long),
        )
