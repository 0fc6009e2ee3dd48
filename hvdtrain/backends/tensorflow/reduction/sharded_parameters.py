"""TensorFlow's parameters divided among the workers; ``reduction/shards.py`` says which numbers are whose."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.reduction.shards import ShardedBucket, shard
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.state.model_state import Field
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError
from hvdtrain.workers.agreement import Workers

Tensor = Any
Variable = Any


@dataclass(frozen=True, eq=False)
class OwnSegment:
    """What this worker owns of one parameter."""

    field: Field  # the parameter
    variable: Variable  # a vector with its part; what the optimizer updates
    begin: int  # the first of its numbers, in the flattened parameter
    end: int  # the number after its last one
    offset: int  # its offset in the worker's part of the bucket

    def of(self, tensor: Tensor) -> Tensor:
        """Return the segment of a tensor that is shaped as the parameter."""
        return tf.reshape(tensor, [-1])[self.begin : self.end]

    def in_part(self, part: Any) -> Any:
        """Return the segment's place in a vector with the worker's part of the bucket."""
        return part[self.offset : self.offset + self.end - self.begin]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters of one type that are gathered at once."""

    number: int  # its place among the buckets
    layout: ShardedBucket  # which numbers belong to whom
    fields: tuple[Field, ...]  # the parameters, in the order of the layout
    segments: tuple[OwnSegment, ...]  # what this worker owns
    dtype: Any  # the parameters' type
    zero: Any  # a variable that is 0

    def joined(self, tensors: Callable[[Field], Tensor]) -> Tensor:
        """Return a vector with the whole bucket, of a tensor for each parameter."""
        pieces = [(self.layout.begins[field.path], tensors(field)) for field in self.fields]
        return _joined(pieces, self.layout.length, self.dtype)

    def part_of(self, values: Callable[[OwnSegment], Tensor]) -> Tensor:
        """Return this worker's part of something that every segment has, zeros where no parameter stands.

        If it is all zeros, they come from a variable: what is gathered of a constant, TensorFlow would work
        out once, for all steps.
        """
        if not self.segments:
            return tf.fill([self.layout.part], tf.cast(self.zero.read_value(), self.dtype))
        pieces = [(segment.offset, values(segment)) for segment in self.segments]
        return _joined(pieces, self.layout.part, self.dtype)

    def parted(self, flat: Any) -> Iterator[tuple[Field, Any]]:
        """Yield each parameter with its numbers in a vector with the whole bucket."""
        for field in self.fields:
            begin = self.layout.begins[field.path]
            yield field, flat[begin : begin + field.variable.shape.num_elements()]


class ShardedParameters:
    """The trainable parameters of a model, of which every worker updates a part."""

    def __init__(self, trainable: Sequence[Field], workers: Workers) -> None:
        self.workers = workers
        self.buckets: list[Bucket] = []
        self.zero = tf.Variable(0.0, trainable=False, name="zero")
        self._used = tf.Variable(0.0, trainable=False, name="used")
        kinds: dict[str, dict[str, Field]] = {}
        for field in reversed(trainable):
            _check_unconstrained(field)
            kinds.setdefault(str(field.variable.dtype), {})[field.path] = field
        for dtype, fields in kinds.items():
            sizes = {path: native(field.variable).shape.num_elements() for path, field in fields.items()}
            kind = tf.as_dtype(dtype)
            for layout in shard(sizes, workers.size, kind.size):
                own = tuple(
                    _own_segment(fields[s.name], s.begin, s.end, s.offset)
                    for s in layout.segments[workers.rank]
                )
                members = tuple(fields[name] for name in layout.begins)
                self.buckets.append(Bucket(len(self.buckets), layout, members, own, kind, self.zero))
        # Keras's optimizers need one
        self.variables: list[Variable] = [segment.variable for segment in self.segments] or [
            keras.Variable(np.zeros(0, np.float32), name="no_segment")
        ]

    @property
    def segments(self) -> list[OwnSegment]:
        """What this worker owns, in the order of the buckets."""
        return [segment for bucket in self.buckets for segment in bucket.segments]

    def follow(self) -> None:
        """Give the segments the parameters' values, which whoever loads or changes a model sets."""
        for segment in self.segments:
            native(segment.variable).assign(segment.of(native(segment.field.variable)))

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Use tensors that come from collectives, in a traced step.

        If this worker has no segment of them, TensorFlow would leave out the collectives, for which the other
        workers would wait.
        """
        numbers = [tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32) for tensor in tensors]
        self._used.assign(tf.reduce_sum(tf.concat(numbers, 0)))

    def gather(self, values: Callable[[OwnSegment], Tensor], name: str) -> None:
        """Collective. Set every parameter, from what each worker has for its segments."""
        assigned: list[Tensor] = []
        for bucket in self.buckets:
            with tf.control_dependencies(assigned):  # one after the other: each takes memory
                flat = hvd.allgather(bucket.part_of(values), name=f"hvdtrain.{name}.{bucket.number}")
            assigned = []
            for field, numbers in bucket.parted(flat):
                variable = native(field.variable)
                assigned.append(variable.assign(tf.reshape(numbers, variable.shape), read_value=False))

    def gather_on_root(
        self, values: Callable[[OwnSegment], Tensor], name: str
    ) -> Iterator[tuple[Bucket, NDArray[Any]]]:
        """Collective. Yield each bucket of all workers on rank 0, and an empty one on others.

        Every worker takes all of them.
        """
        for bucket in self.buckets:
            splits = np.zeros(self.workers.size, np.int32)
            splits[0] = bucket.layout.part
            flat, _ = hvd.alltoall(
                bucket.part_of(values), tf.constant(splits), name=f"hvdtrain.{name}.{bucket.number}"
            )
            yield bucket, flat.numpy()

    def scatter_from_root(
        self,
        fill: Callable[[Bucket], NDArray[Any]],
        take: Callable[[OwnSegment, Tensor], None],
        name: str,
    ) -> None:
        """Collective. Give every worker its part of what rank 0 has, one bucket after the other."""
        for bucket in self.buckets:
            is_root = self.workers.rank == 0
            given = fill(bucket) if is_root else np.zeros(bucket.layout.length, bucket.dtype.as_numpy_dtype)
            flat = hvd.broadcast(tf.constant(given), 0, name=f"hvdtrain.{name}.{bucket.number}")
            begin = self.workers.rank * bucket.layout.part
            for segment in bucket.segments:
                # a copy: a variable that is assigned a slice keeps what this is a slice of
                take(segment, segment.in_part(flat[begin : begin + bucket.layout.part]).numpy())


def _joined(pieces: Sequence[tuple[int, Tensor]], length: int, dtype: Any) -> Tensor:
    """Return a vector with tensors at their places, which ascend, and zeros elsewhere."""
    parts, end = [], 0
    for begin, tensor in pieces:
        numbers = tf.reshape(tensor, [-1])
        if begin > end:
            parts.append(tf.zeros([begin - end], dtype))
        parts.append(numbers)
        end = begin + numbers.shape.num_elements()
    if length > end:
        parts.append(tf.zeros([length - end], dtype))
    return tf.concat(parts, 0)


def _own_segment(field: Field, begin: int, end: int, offset: int) -> OwnSegment:
    values = tf.reshape(native(field.variable), [-1])[begin:end].numpy()
    name = f"{field.path.replace('/', '_')}_{begin}"
    return OwnSegment(
        field, keras.Variable(values, dtype=field.variable.dtype, name=name), begin, end, offset
    )


def _check_unconstrained(field: Field) -> None:
    if getattr(field.variable, "constraint", None) is not None:
        raise ConfigError(
            f"{field.path} has a constraint, which Keras applies to whole parameters, and with shard each "
            "worker updates a part of them",
            "Leave shard or the constraint out.",
            everywhere=True,
        )


def make_shards(config: Config, trainable: Sequence[Field], workers: Workers) -> ShardedParameters | None:
    """Return the parameters, divided among workers as a config requests; None if each updates all of them."""
    return ShardedParameters(trainable, workers) if config.shard != "none" and workers.size > 1 else None
