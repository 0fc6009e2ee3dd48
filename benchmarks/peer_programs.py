"""The programs that ``peers.py`` runs: python peer_programs.py FRAMEWORK PROGRAM MODEL STEPS FOLDER."""

import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

# samples of a worker's batch, shape of one, classes
MODELS = {
    "mlp": (32, (8, 8, 1), 10),
    "narrow": (32, (8, 8, 1), 10),
    "convnet": (32, (16, 16, 3), 10),
    "resnet18": (16, (32, 32, 3), 10),
    "gpt": (12, (64,), 65),
    "gpt-wide": (4, (64,), 65),
    "vgg-like": (32, (32, 32, 3), 10),
}
GPT_SIZES = {"gpt": (4, 4, 128), "gpt-wide": (12, 8, 256)}  # layers, heads, channels
CHANNELS = (64, 128, 192, 256)
VGG = (
    (32, 64, 128, 128),
    (2048, 2048, 768),
)  # channels of convolutions without norms, widths of dense layers
DENSE = {"mlp": (4, 1400), "narrow": (100, 128)}  # layers, their width
RESULT = "milliseconds"  # the file in which a program writes what it found
FREE = "-free"  # the end of the names of programs that choose their number of inter-op threads
RATE, MOMENTUM, DECAY, WARM = 0.001, 0.9, 1e-4, 15


class Peer:
    """Random data and one of the models."""

    loss = "cross_entropy"

    def __init__(self, model: str) -> None:
        self.model = model
        self.batch, self.shape, self.classes = MODELS[model]

    def train_data(self):
        random, samples = np.random.RandomState(0), 64 * self.batch
        if self.model in GPT_SIZES:
            return tuple(random.randint(0, self.classes, (samples, *self.shape)) for _ in range(2))
        images = random.rand(samples, *self.shape).astype(np.float32)
        return images, random.randint(0, self.classes, samples)

    def eval_data(self):
        return None

    def torch_model(self):
        from torch import nn

        if self.model in GPT_SIZES or self.model == "resnet18":
            return self._built_in("torch_model")
        if self.model in DENSE:
            count, width = DENSE[self.model]
            widths = [64, *[width] * count]
            pairs = [(nn.Linear(i, o), nn.ReLU()) for i, o in pairwise(widths)]
            return nn.Sequential(nn.Flatten(), *sum(pairs, ()), nn.Linear(width, self.classes))

        class ChannelsFirst(nn.Module):
            def forward(self, images):
                return images.permute(0, 3, 1, 2)

        layers, before = [ChannelsFirst()], self.shape[-1]
        if self.model == "vgg-like":
            for channels in VGG[0]:
                layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
                before = channels
            layers, before = [*layers, nn.Flatten()], before * 4
            for width in VGG[1]:
                layers, before = [*layers, nn.Linear(before, width), nn.ReLU()], width
            return nn.Sequential(*layers, nn.Linear(before, self.classes))
        for channels in CHANNELS:
            layers += [nn.Conv2d(before, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            before = channels
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, self.classes))

    def tf_model(self):
        import keras
        from keras import layers

        if self.model in GPT_SIZES or self.model == "resnet18":
            return self._built_in("tf_model")
        x = inputs = keras.Input(self.shape)
        if self.model in DENSE:
            count, width = DENSE[self.model]
            x = layers.Flatten()(x)
            for _ in range(count):
                x = layers.Dense(width, "relu")(x)
        elif self.model == "vgg-like":
            for channels in VGG[0]:
                x = layers.MaxPool2D()(layers.Conv2D(channels, 3, padding="same", activation="relu")(x))
            x = layers.Flatten()(x)
            for width in VGG[1]:
                x = layers.Dense(width, "relu")(x)
        else:
            for channels in CHANNELS:
                x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
                x = layers.MaxPool2D()(layers.ReLU()(layers.BatchNormalization()(x)))
            x = layers.Flatten()(x)
        return keras.Model(inputs, layers.Dense(self.classes)(x))

    def _built_in(self, function):
        from hvdtrain.models import gpt
        from hvdtrain.models.choose import image_model

        if self.model == "resnet18":
            return image_model(function.partition("_")[0], "resnet18", self.shape, self.classes)
        return getattr(gpt, function)(self.classes, *self.shape, *GPT_SIZES[self.model])


class Clock:
    """Notes when steps end."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._ends: list[float] = []

    def tick(self) -> None:
        self._ends.append(time.perf_counter())

    def show(self) -> None:
        """Write the median time of a step, without the first ones; of several writers the last one counts."""
        middle = statistics.median(after - before for before, after in pairwise(self._ends[WARM:]))
        own = self._folder / f"{RESULT}.{os.getpid()}"
        own.write_text(f"{middle * 1e3:.4f}")
        own.replace(self._folder / RESULT)


def run_hvdtrain(framework, task, steps, folder, **options):
    from hvdtrain import train

    clock = Clock(folder)

    class StepTimer:
        def on_step(self, step, metrics):
            clock.tick()

    train(
        f"{__file__}:Peer", framework=framework, steps=steps, batch_size=task.batch, learning_rate=RATE,
        momentum=MOMENTUM, weight_decay=DECAY, lr_scaling="none", task_options={"model": task.model},
        eval_every=None, threads=1, run_dir=f"{folder}/run", callbacks=[StepTimer()], **options,
    )  # fmt: skip
    if os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0":
        clock.show()


def run_torch(program, task, steps, folder):
    """PyTorch's tutorial on DistributedDataParallel, Horovod's example, or neither."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, rank, size = task.torch_model(), 0, 1
    if program.startswith("ddp"):
        torch.distributed.init_process_group("gloo")
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if program == "ddp-fp16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, fused=True
    )
    if program == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    data = TensorDataset(*map(torch.from_numpy, task.train_data()))
    sampler = DistributedSampler(data, size, rank)
    loader, clock, done = DataLoader(data, task.batch, sampler=sampler), Clock(folder), 0
    while done < steps:
        sampler.set_epoch(done)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
            optimizer.step()
            clock.tick()
            done += 1
            if done == steps:
                break
    if rank == 0:
        clock.show()
    if program.startswith("ddp"):
        torch.distributed.destroy_process_group()


def run_tf(program, task, steps, folder):
    """A loop around a tf.function that reduces gradients in one of several ways."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy() if program == "mwms" else None
    hvd, rank, size = None, 0, 1
    if strategy is not None:
        resolver = strategy.cluster_resolver
        rank, size = resolver.task_id, strategy.num_replicas_in_sync
    elif program != "plain":
        import horovod.tensorflow as hvd

        hvd.init()
        rank, size = hvd.rank(), hvd.size()
    keras.utils.set_random_seed(0)
    model = task.tf_model()
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM, weight_decay=DECAY)
    optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = [variable.value for variable in model.trainable_variables]

    def reduced(gradients):
        if program == "mwms":
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        if program == "grouped":  # which fails in a graph with the sparse gradients of embeddings
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
            return hvd.grouped_allreduce(gradients, op=hvd.Average)
        if program == "flat":
            sizes = [gradient.shape.num_elements() for gradient in gradients]
            flat = hvd.allreduce(tf.concat([tf.reshape(g, [-1]) for g in gradients], 0), op=hvd.Average)
            parts = tf.split(flat, sizes)
            return [tf.reshape(part, g.shape) for part, g in zip(parts, gradients, strict=True)]
        return gradients

    def mean_gradients(inputs, targets):
        with tf.GradientTape() as tape:
            loss = loss_function(targets, model(inputs, training=True))
        if program == "horovod":
            tape = hvd.DistributedGradientTape(tape)
        return reduced(tape.gradient(loss, variables))

    @tf.function
    def step(*batch):
        # Keras 3 updates no variables in a replica's context
        gradients = mean_gradients(*batch) if strategy is None else strategy.run(mean_gradients, args=batch)
        optimizer.apply(gradients, model.trainable_variables)

    data = tf.data.Dataset.from_tensor_slices(task.train_data()).shard(size, rank)
    data = data.shuffle(64 * task.batch, seed=0).repeat().batch(task.batch, drop_remainder=True).prefetch(2)
    clock = Clock(folder)
    for inputs, targets in data.take(steps):
        step(inputs, targets)
        clock.tick()
    if rank == 0:
        clock.show()


def main():
    framework, program, model, steps, folder = sys.argv[1:]
    task = Peer(model)
    if program.startswith("hvdtrain"):
        options = {"hvdtrain-fp16": {"compression": "fp16"}, "hvdtrain-late": {"overlap": "false"}}
        run_hvdtrain(framework, task, int(steps), folder, **options.get(program, {}))
    elif framework == "torch":
        run_torch(program, task, int(steps), folder)
    else:
        run_tf(program.removesuffix(FREE), task, int(steps), folder)


if __name__ == "__main__":
    main()
