"""How TensorFlow's gradients are summed over workers by all-reduces of flat tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.tensorflow.functions import marked
from hvdtrain.backends.tensorflow.reduction.flat import make_buckets
from hvdtrain.backends.tensorflow.traced_workers import Sized
from hvdtrain.backends.workers import group_of

Tensor = Any
Variable = Any


class AllReduce(GradientReducer):
    """All-reduces of the gradients of one type, which stand side by side in memory: one for about 32 MiB.

    On a GPU there are up to four for fewer, too, and the graph begins one when its gradients are computed. On
    a CPU, one is joined when the one before is reduced, so that memory holds the copies of one alone. What is
    added in which order depends on nothing but the parameters and the workers, so a run repeats bit by bit.

    With fp16, each gradient is multiplied by the number of workers before it is cast, and the sum is
    divided by it: gradients are parts of the mean over all workers, which get smaller as workers are
    added, and fp16 has few digits below 6e-5. For powers of two this changes nothing else. A loss scale
    has multiplied them already.

    Args:
        workers: the job's workers.
        scaled: whether a loss scale has multiplied the gradients by the number of workers.
        fp16: whether floating-point gradients travel as fp16.
        overlaps: whether reductions begin during the backward pass, the same on all workers; None: on a GPU.

    Attributes:
        label: what stands in the names of its messages, so that several reducers have different ones.
    """

    def __init__(
        self, workers: Sized, scaled: bool = False, *, fp16: bool = False, overlaps: bool | None = None
    ) -> None:
        self.label = ""
        self._workers = workers
        self._group = group_of(workers)
        self._fp16 = fp16
        self._scaled = scaled
        self._overlaps = overlaps

    def attach(self, parameters: Mapping[str, Variable]) -> None:
        """Do nothing: the graph begins each all-reduce when it can."""

    def finish(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Collective. Return the sum of each gradient over workers."""
        if not self._workers.may_reduce:
            return list(gradients)
        overlaps = bool(tf.config.get_visible_devices("GPU")) if self._overlaps is None else self._overlaps
        given = {str(index): gradient for index, gradient in enumerate(gradients)}
        sums: dict[str, Tensor] = {}
        buckets = make_buckets(given, overlaps)
        are_large = len(buckets) > 1 and not overlaps
        before: list[Tensor] = []
        for number, bucket in enumerate(buckets):
            name = f"hvdtrain.gradients.{self.label}{number}"
            with tf.control_dependencies(before):
                flat = bucket.joined(given)
            total = self._reduce(flat, name)
            parts = bucket.parted(total)
            if are_large:
                before = [total]
                # a part of a larger tensor could not be multiplied in place, and all are multiplied at once
                parts = {name: tf.raw_ops.DeepCopy(x=part) for name, part in parts.items()}
            sums |= parts
        for name, gradient in given.items():
            if name not in sums:  # its shape is only known when the graph runs
                sums[name] = self._reduce(gradient, f"hvdtrain.gradient.{self.label}{name}")
        return [sums[name] for name in given]

    def finish_with(self, gradients: Sequence[Tensor], vector: Tensor) -> tuple[list[Tensor], Tensor]:
        """Collective. As ``finish``; return the sum of a short vector, too, which travels with gradients.

        It travels by itself if gradients are compressed, or if none has its type.
        """
        if not self._workers.may_reduce:
            return list(gradients), vector
        if self._fp16:
            vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")
            return self.finish(gradients), vector
        vector, *sums = self.finish([vector, *gradients])  # it is the last one of the last bucket
        return sums, vector

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        return "fp32, sent " + ("as fp16" if self._fp16 else "uncompressed")

    def _reduce(self, gradient: Tensor, name: str) -> Tensor:
        with marked(name):
            if not (self._fp16 and gradient.dtype.is_floating):
                return hvd.allreduce(gradient, op=hvd.Sum, name=name, **self._group)
            factor = self._factor(gradient.dtype)
            small = tf.cast(gradient * factor, tf.float16)
            if self._workers.is_elastic:  # the factor is a tensor, which Horovod does not take
                total = hvd.allreduce(small, op=hvd.Sum, name=name)
                return tf.cast(total, gradient.dtype) / factor
            total = hvd.allreduce(small, op=hvd.Sum, postscale_factor=1 / factor, name=name, **self._group)
            return tf.cast(total, gradient.dtype)

    def _factor(self, dtype: Any) -> Any:
        """Return what gradients of a type are multiplied by: a number, or in an elastic job a tensor."""
        if self._scaled:
            return 1
        size = self._workers.size
        return tf.cast(size, dtype) if self._workers.is_elastic else size
