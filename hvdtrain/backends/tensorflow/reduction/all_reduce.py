"""How TensorFlow's gradients are summed over workers by all-reduces of flat tensors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.reduction import GradientReducer, meanwhile, no_bf16
from hvdtrain.backends.tensorflow.batches import Sized
from hvdtrain.backends.tensorflow.functions import marked
from hvdtrain.backends.tensorflow.reduction.flat import make_buckets
from hvdtrain.backends.workers import group_of

Tensor = Any


class Reducer(GradientReducer):
    """A reducer of TensorFlow; see ``GradientReducer``."""

    def finish(self, gradients: Sequence[Tensor], vector: Tensor = None) -> tuple[list[Tensor], Tensor]:
        """Collective. Return the sum of each gradient over workers, and that of a vector, by itself."""
        if not self._workers.may_reduce:
            return list(gradients), vector
        if vector is not None:
            vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")
        return self._sum(gradients), vector


class AllReduce(Reducer):
    """All-reduces of flat tensors, in an order that repeats; see ``torch/reduction/all_reduce.py``."""

    carries = True  # whether a step's vector travels with the gradients, if one has its type
    sent_as = "uncompressed"

    label = ""  # in the names of its messages, so that several reducers have different ones

    def __init__(self, workers: Sized, scaled: bool = False) -> None:
        super().__init__(workers, scaled)
        self._group = group_of(workers)

    def finish(self, gradients: Sequence[Tensor], vector: Tensor = None) -> tuple[list[Tensor], Tensor]:
        """Collective. Return the sum of each gradient over workers, and that of a vector."""
        if vector is None or not (self.carries and self._workers.may_reduce):
            return super().finish(gradients, vector)
        vector, *sums = self._sum([vector, *gradients])  # it is the last one of the last bucket
        return sums, vector

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        given = {name: tf.TensorSpec(v.shape, v.dtype) for name, v in self._parameters.items()}
        return f"fp32, sent {self.sent_as}{meanwhile(len(make_buckets(given, True)) if self.is_early else 0)}"

    @property
    def is_early(self) -> bool:
        """Whether gradients of the attached parameters are sent during the backward pass."""
        return self._begins_early(tf.TensorSpec(v.shape, v.dtype) for v in self._parameters.values())

    def _begins_early(self, tensors: Iterable[Any]) -> bool:
        size = sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)
        on_gpu = bool(tf.config.get_visible_devices("GPU"))
        return self._workers.may_reduce and self.begins_early(size, on_gpu)

    def _sum(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        given = {str(index): gradient for index, gradient in enumerate(gradients)}
        sums: dict[str, Tensor] = {}
        overlaps = self._begins_early(gradients)
        buckets = make_buckets(given, overlaps)
        are_large = len(buckets) > 1 and not overlaps
        before: list[Tensor] = []
        for number, bucket in enumerate(buckets):
            name = f"hvdtrain.gradients.{self.label}{number}"
            with tf.control_dependencies(before):  # memory holds the copies of one alone
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

    def _cast_for(self, dtype: Any) -> tuple[Any, Any]:
        """Return the type in which numbers travel, and what they are multiplied by before that."""
        return dtype, 1

    def _reduce(self, gradient: Tensor, name: str) -> Tensor:
        kind, factor = self._cast_for(gradient.dtype)
        with marked(name):
            is_one = isinstance(factor, int) and factor == 1
            if kind == gradient.dtype and is_one:
                return hvd.allreduce(gradient, op=hvd.Sum, name=name, **self._group)
            small = tf.cast(gradient if is_one else gradient * factor, kind)
            if self._workers.is_elastic:  # the factor is a tensor, which Horovod does not take
                total = hvd.allreduce(small, op=hvd.Sum, name=name)
                return tf.cast(total, gradient.dtype) / factor
            total = hvd.allreduce(small, op=hvd.Sum, postscale_factor=1 / factor, name=name, **self._group)
            return tf.cast(total, gradient.dtype)


class Fp16(AllReduce):
    """All-reduces of floating-point gradients as fp16; see ``torch/reduction/all_reduce.py``."""

    carries = False
    sent_as = "as fp16"

    def _cast_for(self, dtype: Any) -> tuple[Any, Any]:
        if not dtype.is_floating:
            return super()._cast_for(dtype)
        if self._scaled:
            return tf.float16, 1
        size = self._workers.size
        return tf.float16, tf.cast(size, dtype) if self._workers.is_elastic else size


class BFloat16(AllReduce):
    """All-reduces of gradients of fp32 as bf16; see ``torch/reduction/all_reduce.py``."""

    carries = False
    sent_as = "as bf16"

    def attach(self, parameters: Mapping[str, Any]) -> None:
        """Take the parameters; refuse them if the installed Horovod sums no bf16 where they are."""
        super().attach(parameters)
        if not self._workers.may_reduce:
            return
        try:
            with tf.Graph().as_default():
                hvd.allreduce(tf.zeros(1, tf.bfloat16), op=hvd.Sum)
        except TypeError as error:
            raise no_bf16() from error
        if tf.config.get_visible_devices("GPU") and hvd.nccl_built():
            raise no_bf16()

    def _cast_for(self, dtype: Any) -> tuple[Any, Any]:
        return tf.bfloat16 if dtype == tf.float32 else dtype, 1
