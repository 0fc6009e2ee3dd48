"""Losses that compare the samples of a batch: with the rows of all workers, or refused."""

from collections.abc import Mapping
from typing import Any

from conformance.zoo import GRADIENT_DESCENT, Judge, Model, tf_classifier, torch_classifier

import hvdtrain

COMPARES = ("depends on the other samples of its batch", "hvdtrain.all_gather", "per_worker_loss")


class Triplets(Model):
    """Batch-hard triplets: the farthest sample of the same class, and the nearest of another."""

    # evaluation batches are global batches, too
    defaults: Mapping[str, Any] = {k: v for k, v in GRADIENT_DESCENT.items() if k != "eval_batch_size"}

    def gathered(self, tensor: Any) -> Any:
        """Return what each sample is compared with."""
        return hvdtrain.all_gather(tensor)

    def torch_loss(self, model, batch):
        import torch

        own, targets = model(batch["inputs"]), batch["targets"]
        distances = torch.cdist(own, self.gathered(own))
        same = targets[:, None] == self.gathered(targets)
        hardest = (distances * same).max(1).values - (distances + 1e3 * same).min(1).values
        return torch.nn.functional.softplus(hardest), {}

    def tf_loss(self, model, batch):
        import tensorflow as tf

        own, targets = model(batch["inputs"]), batch["targets"]
        distances = tf.reduce_sum((own[:, None] - self.gathered(own)) ** 2, 2)
        same = tf.cast(targets[:, None] == self.gathered(targets), tf.float32)
        hardest = tf.reduce_max(distances * same, 1) - tf.reduce_min(distances + 1e3 * same, 1)
        return tf.nn.softplus(hardest), {}

    torch_model, tf_model = torch_classifier, tf_classifier


class Contrastive(Triplets):
    """Each sample finds its own second view among those of all samples, at a temperature that is learned."""

    judge = Judge(frameworks=("torch",))

    def torch_loss(self, model, batch):
        import torch
        from torch.nn.functional import cross_entropy

        one, other = model(batch["inputs"]), model(batch["inputs"] * 0.5 + 0.1)
        others, own = hvdtrain.all_gather(other, positions=True)
        logits = torch.exp(model.temperature) * one @ others.T
        return cross_entropy(logits, own, reduction="none"), {}

    def torch_model(self):
        import torch

        model = super().torch_model()
        model.temperature = torch.nn.Parameter(torch.tensor(0.3))
        return model


class DiceOfAll(Triplets):
    """Soft Dice over all samples of the global batch: one number, given as a mean."""

    judge = Judge(frameworks=("torch",), workers=(3,))

    def torch_loss(self, model, batch):
        outputs = model(batch["inputs"])
        predicted = self.gathered(outputs)[:, 0].sigmoid()
        actual = (self.gathered(batch["targets"]) == 1).float()
        dice = 2 * (predicted * actual).sum() / (predicted.sum() + actual.sum())
        return hvdtrain.Weighted(1 - dice, len(outputs)), {}


class PerWorkerTriplets(Triplets):
    """Each worker would compare its own samples alone."""

    judge = Judge(workers=(2,), refused=COMPARES)

    def gathered(self, tensor: Any) -> Any:
        return tensor


class AloneTriplets(PerWorkerTriplets):
    """One worker has all samples."""

    judge = Judge(workers=(1,))


class PerWorkerDice(DiceOfAll):
    """The mean of a worker's samples, which is no mean over samples."""

    judge = Judge(("torch",), (2,), refused=("is not the mean over its samples", "hvdtrain.all_gather"))

    def gathered(self, tensor: Any) -> Any:
        return tensor


class HorovodsGather(Triplets):
    """Horovod's own allgather, whose gradient is too small."""

    judge = Judge(workers=(2,), refused=("Horovod's allgather", "hvdtrain.all_gather(tensor"))

    def torch_loss(self, model, batch):
        import horovod.torch as hvd

        self.gathered = hvd.allgather
        return super().torch_loss(model, batch)

    def tf_loss(self, model, batch):
        import horovod.tensorflow as hvd

        self.gathered = hvd.allgather
        return super().tf_loss(model, batch)


class BatchNormAndNoise(Triplets):
    """Batch norm and random numbers make samples of a batch depend on one another, and are no such loss."""

    judge = Judge(("torch",), (1,))

    def torch_loss(self, model, batch):
        from torch.nn.functional import cross_entropy

        return cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none"), {}

    def torch_model(self):
        import torch

        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
