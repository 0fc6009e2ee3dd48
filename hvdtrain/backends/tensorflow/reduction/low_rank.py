"""PowerSGD in TensorFlow: gradients travel as two thin matrices, and what they leave out travels later."""

from collections.abc import Sequence
from math import prod
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from hvdtrain.backends.reduction.low_rank import CommonLowRank, first_factor, matrix_shape, orthonormal
from hvdtrain.backends.tensorflow.reduction.all_reduce import Reducer
from hvdtrain.backends.tensorflow.reduction.broadcast import broadcast_variables
from hvdtrain.backends.tensorflow.state.model_state import Field

Tensor = Any
Tensors = Sequence[Tensor]


class LowRank(CommonLowRank, Reducer):
    """Sums gradients over workers as matrices of low rank, as ``reduction/low_rank.py`` says."""

    _in_warmup = False
    _compresses: Any

    def follow(self, in_warmup: bool = False, passes: int = 1) -> None:
        """Compress the gradients of the next step unless it lies in the learning rate's warm-up. Local."""
        if in_warmup != self._in_warmup:
            self._in_warmup = in_warmup
            self._compresses.assign(np.asarray(not in_warmup))

    def broadcast(self, root: int) -> None:
        """Collective. Copy what the root keeps to every worker."""
        broadcast_variables(list(self.tensors.values()), root, label="reducer")

    def _read(self, name: str, tensor: Any, is_part: bool) -> Any:
        value, size = tensor.read_value(), self._workers.size
        if is_part:
            if size > 1:
                value = hvd.allreduce(value, op=hvd.Sum, name=f"hvdtrain.{name}")
            tensor.assign(value / np.float32(size))
        return value.numpy()

    def _set(self, tensor: Any, values: Any) -> None:
        tensor.assign(values)

    def _make_matrices(self, fields: list[Field], seed: int) -> None:
        self._compresses = tf.Variable(True, trainable=False, name="compresses")
        self._sizes = {id(f.variable): prod(f.shape) * tf.as_dtype(f.variable.dtype).size for f in fields}
        self._matrices = {
            id(field.variable): _Matrix(field, self._rank, seed)
            for field in fields
            if field.variable.dtype == "float32" and matrix_shape(field.shape, self._rank)
        }
        self._all = list(self._matrices.values())

    def finish(self, gradients: Tensors, vector: Tensor = None) -> tuple[list[Tensor], Tensor]:
        """Collective. Return the sums of low rank, and that of a vector, which is in the last message."""
        # the vector is in the last message: errors and Q change when all sums of a step have succeeded
        vectors = () if vector is None else (vector,)
        variables = list(self._parameters.values())
        # of an unknown shape, it is that of the parameter
        pairs = zip(variables, gradients, strict=True)
        gradients = [g if g.shape.is_fully_defined() else tf.ensure_shape(g, v.shape) for v, g in pairs]
        places = [self._matrices.get(id(variable)) for variable in variables]
        found = zip(places, gradients, strict=True)
        by_matrix = {id(matrix): gradient for matrix, gradient in found if matrix is not None}
        others = [g for matrix, g in zip(places, gradients, strict=True) if matrix is None]
        factor = None if self._loss_scale is None else self._loss_scale.factor
        moments = []
        for matrix in self._all:
            error = matrix.error.read_value()
            gradient = tf.reshape(by_matrix[id(matrix)], matrix.shape)
            moments.append(gradient + (error if factor is None else error * factor))
        ways = (
            lambda: self._reduce_compressed(moments, others, vectors, factor),
            lambda: self._reduce_uncompressed(moments, others, vectors),
        )
        reduced = list(tf.cond(self._compresses, *ways) if self._all else ways[1]())
        totals, rest = reduced[: len(moments)], reduced[len(moments) :]
        known = {id(matrix): total for matrix, total in zip(self._all, totals, strict=True)}
        sums = [
            rest.pop(0) if matrix is None else tf.reshape(known[id(matrix)], gradient.shape)
            for matrix, gradient in zip(places, gradients, strict=True)
        ]
        return sums, rest[0] if rest else None

    def _reduce_compressed(
        self, moments: Tensors, others: Tensors, vectors: Tensors, factor: Tensor | None
    ) -> list[Tensor]:
        """Collective. Return the sums of the matrices, other gradients and vectors; keep what is left."""
        left = [moment @ matrix.q.read_value() for moment, matrix in zip(moments, self._all, strict=True)]
        summed = self._sum_all("p", [*left, *others])
        left, rest = summed[: len(left)], summed[len(left) :]
        found = _orthonormal(left)
        own = [tf.matmul(moment, p, transpose_a=True) for moment, p in zip(moments, found, strict=True)]
        summed = self._sum_all("q", [*own, *vectors])
        right, vectors = summed[: len(own)], summed[len(own) :]
        totals = [tf.matmul(p, q, transpose_b=True) for p, q in zip(found, right, strict=True)]
        # what this worker's part leaves out
        parts = zip(moments, found, own, strict=True)
        errors = [moment - tf.matmul(p, q, transpose_b=True) for moment, p, q in parts]
        if factor is not None:
            errors = [error / factor for error in errors]
        factors = _orthonormal(right, [matrix.first for matrix in self._all])
        self._keep(errors, factors, [*left, *right, *rest], vectors)
        return [*totals, *rest, *vectors]

    def _reduce_uncompressed(self, moments: Tensors, others: Tensors, vectors: Tensors) -> list[Tensor]:
        """Collective. Return the sums of the matrices, other gradients and vectors; nothing is left out."""
        summed = self._sum_all("uncompressed", [*moments, *others, *vectors])
        sent = summed[: len(summed) - len(vectors)]
        factors = [matrix.q.read_value() for matrix in self._all]
        self._keep([tf.zeros(matrix.shape) for matrix in self._all], factors, sent, summed[len(sent) :])
        return summed

    def _sum_all(self, what: str, tensors: Tensors) -> list[Tensor]:
        """Collective. Return the sums of tensors over workers, as one message for each type."""
        if not self._workers.may_reduce:
            return list(tensors)
        by_type: dict[Any, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_type.setdefault(tensor.dtype, []).append(index)
        messages = [tf.concat([tf.reshape(tensors[i], [-1]) for i in part], 0) for part in by_type.values()]
        if self.clock is not None:
            self.clock.ready(messages)
        sums = []
        for message in messages:
            name = f"hvdtrain.low_rank.{what}.{message.dtype.name}"
            # without a mark, TensorFlow merges reductions of tensors that are equal on this worker
            mark = {"_hvdtrain_low_rank": AttrValue(s=name.encode())}
            with tf.compat.v1.get_default_graph()._attr_scope(mark):
                # of an operation in a branch, TensorFlow's name has a number that differs by graph, and
                # ranks with padding run another graph than those without
                sums.append(hvd.allreduce(message, op=hvd.Sum, name=name, ignore_name_scope=True))
        if self.clock is not None:
            (self.clock.resumed if what == "p" else self.clock.reduced)(sums)
        found = list(tensors)
        for message, indices in zip(sums, by_type.values(), strict=True):
            parts = tf.split(message, [tensors[i].shape.num_elements() for i in indices])
            for i, part in zip(indices, parts, strict=True):
                found[i] = tf.reshape(part, tensors[i].shape)
        return found

    def _keep(self, errors: Tensors, factors: Tensors, sent: Tensors, vectors: Tensors) -> None:
        """Take the errors and Q of a step when all of it has been reduced, and the gradients are finite."""
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in sent])
        with tf.control_dependencies([tf.group(*sent, *vectors)]):
            for matrix, error, q in zip(self._all, errors, factors, strict=True):
                matrix.error.assign(tf.where(is_finite, error, matrix.error.read_value()))
                matrix.q.assign(tf.where(is_finite, q, matrix.q.read_value()))


class _Matrix:
    """One portable array of a gradient as a matrix, and what is kept of it from step to step."""

    def __init__(self, field: Field, rank: int, seed: int) -> None:
        shape = matrix_shape(field.shape, rank)
        assert shape is not None  # those without one travel as they are
        self.path, self.portable_shape, self.shape = field.path, field.shape, shape
        self.first = first_factor(field.path, shape[1], rank, seed)
        # what this worker has not sent yet
        self.error = tf.Variable(np.zeros(shape, np.float32), trainable=False, name="error")
        self.q = tf.Variable(self.first, trainable=False, name="q")


def _orthonormal(matrices: Tensors, refill: Sequence[Any] | None = None) -> list[Tensor]:
    def compute(*arrays: Any) -> list[Any]:
        return orthonormal(arrays, refill)

    found = tf.nest.flatten(tf.numpy_function(compute, matrices, [matrix.dtype for matrix in matrices]))
    return [tf.ensure_shape(one, matrix.shape) for one, matrix in zip(found, matrices, strict=True)]
