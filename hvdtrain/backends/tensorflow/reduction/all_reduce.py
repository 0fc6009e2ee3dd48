"""How TensorFlow's gradients are summed over workers by all-reduces of flat tensors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.reduction import GradientReducer, meanwhile, no_bf16
from hvdtrain.backends.reduction.shards import divide
from hvdtrain.backends.tensorflow.batches import Sized
from hvdtrain.backends.tensorflow.functions import marked
from hvdtrain.backends.workers import group_of

Tensor = Any

_ROW = 16  # elements: 64 bytes, where TensorFlow's parts of a tensor may begin without a copy


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


class Bucket:
    """The gradients of one type in one tensor of rows: first those of whole rows, parts without a copy."""

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        sizes = {name: gradient.shape.num_elements() for name, gradient in gradients.items()}
        self._whole = [name for name, size in sizes.items() if size % _ROW == 0]
        self._packed = [name for name in sizes if name not in self._whole]
        self._sizes = sizes
        self._shapes = {name: gradient.shape for name, gradient in gradients.items()}
        self._fill = -sum(sizes[name] for name in self._packed) % _ROW

    def joined(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the flat tensor."""
        rows = [tf.reshape(gradients[name], [-1, _ROW]) for name in self._whole]
        if self._packed:
            parts = [tf.reshape(gradients[name], [-1]) for name in self._packed]
            if self._fill:
                parts.append(tf.zeros([self._fill], parts[0].dtype))
            rows.append(tf.reshape(tf.concat(parts, 0), [-1, _ROW]))
        return tf.concat(rows, 0)

    def parted(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the gradients that a flat tensor holds, by name."""
        packed = sum(self._sizes[name] for name in self._packed) + self._fill
        counts = [self._sizes[name] // _ROW for name in self._whole]
        rows = tf.split(flat, [*counts, packed // _ROW] if packed else counts, 0)
        parts = dict(zip(self._whole, rows, strict=False))
        if packed:
            sizes = [self._sizes[name] for name in self._packed]
            own = tf.split(tf.reshape(rows[-1], [-1]), [*sizes, self._fill] if self._fill else sizes, 0)
            parts |= dict(zip(self._packed, own, strict=False))
        return {name: tf.reshape(part, self._shapes[name]) for name, part in parts.items()}


def make_buckets(gradients: Mapping[str, Tensor], are_several: bool) -> list[Bucket]:
    """Return buckets for gradients, in the order in which a backward pass completes them."""
    kinds: dict[Any, dict[str, Tensor]] = {}
    for name, gradient in reversed(list(gradients.items())):
        if gradient.shape.is_fully_defined():
            kinds.setdefault(gradient.dtype, {})[name] = gradient
    return [
        Bucket({name: kind[name] for name in names})
        for dtype, kind in kinds.items()
        for names in divide({n: g.shape.num_elements() * dtype.size for n, g in kind.items()}, are_several)
    ]
