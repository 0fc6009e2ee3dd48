"""TensorFlow's parameters divided among the workers; ``reduction/shards.py`` says which numbers are whose."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.reduction.shards import CommonBucket, CommonShardedParameters, OwnSegment, Values
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.state.model_state import Field
from hvdtrain.errors import ConfigError
from hvdtrain.workers.agreement import Workers

Tensor = Any
Variable = Any


class Bucket(CommonBucket):
    """Parameters of one type that are gathered at once."""

    @property
    def dtype(self) -> Any:
        """The parameters' type."""
        return tf.as_dtype(self.entries[0].variable.dtype)

    def joined(self, tensors: Callable[[Field], Tensor]) -> Tensor:
        """Return a vector with the whole bucket, of a tensor for each parameter."""
        pieces = [(self.layout.begins[field.path], tensors(field)) for field in self.entries]
        return _joined(pieces, self.layout.length, self.dtype)

    def parted(self, flat: Any) -> Iterator[tuple[Field, Any]]:
        """Yield each parameter with its numbers in a vector with the whole bucket."""
        for field in self.entries:
            begin = self.layout.begins[field.path]
            yield field, flat[begin : begin + field.variable.shape.num_elements()]

    def by_tensor(self, flat: Any) -> dict[int, Any]:
        """Return the parameters' numbers by the identities of their variables."""
        return {id(field.variable): numbers for field, numbers in self.parted(flat)}


class ShardedParameters(CommonShardedParameters):
    """The trainable parameters of a model, of which every worker updates a part."""

    bucket = Bucket

    def __init__(self, trainable: Sequence[Field], workers: Workers) -> None:
        self.zero = tf.Variable(0.0, trainable=False, name="zero")
        self._used = tf.Variable(0.0, trainable=False, name="used")
        super().__init__(trainable, workers)
        # Keras's optimizers need one
        self.variables: list[Variable] = [segment.tensor for segment in self.segments] or [
            keras.Variable(np.zeros(0, np.float32), name="no_segment")
        ]

    @property
    def tensors(self) -> list[Variable]:
        """The variables of the parameters."""
        return [field.variable for field in self.entries]

    def follow(self) -> None:
        """Give the segments the parameters' values, which whoever loads or changes a model sets."""
        for segment in self.segments:
            native(segment.tensor).assign(segment_of(segment, native(segment.entry.variable)))

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Use tensors of a traced step, whose collectives TensorFlow would leave out without a segment."""
        numbers = [tf.cast(tf.reshape(tensor, [-1])[:1], tf.float32) for tensor in tensors]
        self._used.assign(tf.reduce_sum(tf.concat(numbers, 0)))

    def gather(self, values: Values, name: str) -> None:
        """Collective. Set every parameter, from what each worker has for its segments."""
        assigned: list[Tensor] = []
        for bucket in self.buckets:
            with tf.control_dependencies(assigned):  # one after the other: each takes memory
                flat = hvd.allgather(self._part_of(bucket, values), name=f"hvdtrain.{name}.{bucket.number}")
            assigned = []
            for field, numbers in bucket.parted(flat):
                variable = native(field.variable)
                assigned.append(variable.assign(tf.reshape(numbers, variable.shape), read_value=False))

    def _form_of(self, field: Field) -> tuple[Any, ...]:
        if getattr(field.variable, "constraint", None) is not None:
            raise ConfigError(
                f"{field.path} has a constraint, which Keras applies to whole parameters, and with shard "
                "each worker updates a part of them",
                "Leave shard or the constraint out.",
                everywhere=True,
            )
        variable = native(field.variable)
        return variable.shape.num_elements(), variable.dtype.size, field.variable.dtype

    def _vector_of(self, field: Field, begin: int, end: int) -> Variable:
        values = tf.reshape(native(field.variable), [-1])[begin:end].numpy()
        name = f"{field.path.replace('/', '_')}_{begin}"
        return keras.Variable(values, dtype=field.variable.dtype, name=name)

    def _copies(self) -> list[Tensor]:
        return [tf.identity(native(field.variable)) for field in self.entries]

    def _restore(self, copies: list[Tensor]) -> None:
        for field, value in zip(self.entries, copies, strict=True):
            field.variable.assign(value)

    def _part_of(self, bucket: Bucket, values: Values) -> Tensor:
        if not bucket.segments:  # TensorFlow would gather a constant once, for all steps
            return tf.fill([bucket.layout.part], tf.cast(self.zero.read_value(), bucket.dtype))
        pieces = [(segment.offset, values(segment)) for segment in bucket.segments]
        return _joined(pieces, bucket.layout.part, bucket.dtype)

    def _zeros_of(self, bucket: Bucket) -> NDArray[Any]:
        return np.zeros(bucket.layout.length, bucket.dtype.as_numpy_dtype)

    def _all_to_all(self, part: Tensor, splits: Any, name: str) -> Any:
        return hvd.alltoall(part, tf.constant(splits), name=name)[0].numpy()

    def _broadcast(self, flat: NDArray[Any], name: str) -> Tensor:
        return hvd.broadcast(tf.constant(flat), 0, name=name)

    def _set(self, target: Variable, values: Tensor) -> None:
        # a copy: a variable that is assigned a slice keeps what this is a slice of
        target.assign(values.numpy())


def segment_of(segment: OwnSegment, tensor: Tensor) -> Tensor:
    """Return the segment of a tensor that is shaped as the parameter."""
    return tf.reshape(tensor, [-1])[segment.begin : segment.end]


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
