"""Rows of all workers in TensorFlow; ``torch/objective/gathering.py`` does the same for PyTorch."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.backends.objective import gathering
from hvdtrain.backends.objective.gathering import refuse_horovods_own
from hvdtrain.backends.objective.stateful_metrics import Collectives
from hvdtrain.backends.tensorflow.functions import marked
from hvdtrain.errors import TaskError

Tensor = Any
_LIBRARY = mpi_ops.MPI_LIB
_ALLGATHER = _LIBRARY.horovod_allgather


class Gathering(gathering.Gathering):
    """Gathers rows for TensorFlow's losses, while a step is traced or run eagerly."""

    def __init__(self, size: int, is_compiled: bool) -> None:
        super().__init__(size)
        self._is_compiled = is_compiled

    def _gather(self, tensor: Tensor, name: str) -> tuple[Tensor, Tensor]:
        tensor, counted = tf.convert_to_tensor(tensor), self._weights > 0
        any_counts, samples = tf.reduce_any(counted), tf.shape(tensor)[0]
        if tensor.shape[0] is not None and tensor.shape[0] == counted.shape[0]:
            sent = tf.boolean_mask(tensor, counted)
        else:  # steps whose loss is the task's own have no padding, but for a batch of nothing else
            sent = tensor[: samples * tf.cast(any_counts, tf.int32)]
        gathered, first = sent, tf.constant(0)
        if self._workers.may_reduce:
            if self._is_compiled:
                raise TaskError(
                    "hvdtrain.all_gather cannot be compiled by XLA, for which Horovod has no operations",
                    "Leave --compile out.",
                    everywhere=True,
                )
            counts = _joined(tf.shape(sent)[:1], f"{name}.rows")
            rank = self._workers.rank
            gathered, first = _gather(sent, name, counts, rank), tf.reduce_sum(counts[:rank])
        # samples of weight 0 are compared with something, too
        rest = tensor[samples * tf.cast(any_counts, tf.int32) :]
        first = tf.where(any_counts, first, tf.shape(gathered)[0])
        gathered = tf.concat([gathered, rest], 0)
        return gathered, tf.minimum(tf.range(samples) + first, tf.shape(gathered)[0] - 1)


def _gather(rows: Tensor, name: str, counts: Tensor, rank: Any) -> Tensor:
    """Collective. Return the rows of all workers.

    The backward pass sums what all workers give to this worker's rows. The gradient of a step is the sum over
    workers of the gradients of their losses, so that is exact.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gather(own: Tensor) -> tuple[Tensor, Any]:
        joined = _bf16_as(own.dtype, _joined(_bf16_as(tf.int16, own), name))
        return tf.ensure_shape(joined, (None, *own.shape[1:])), scatter

    # with a derivative of its own: that of Horovod has other names on workers with padding
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scatter(gradient: Tensor) -> tuple[Tensor, Any]:
        sent = _bf16_as(tf.int16, gradient)
        with _named(f"{name}.backward"):
            received, _ = hvd.alltoall(sent, counts, f"{name}.backward", ignore_name_scope=True)
        shape = tf.concat([tf.stack([tf.shape(counts)[0], counts[rank]]), tf.shape(gradient)[1:]], 0)
        return tf.reduce_sum(tf.reshape(_bf16_as(gradient.dtype, received), shape), 0), gather

    return gather(rows)


def _bf16_as(kind: Any, rows: Tensor) -> Tensor:
    """Return the bits of bf16, which not every build of Horovod takes, as another type, or back; or rows."""
    return tf.bitcast(rows, kind) if tf.bfloat16 in (rows.dtype, kind) else rows


def _joined(rows: Tensor, name: str) -> Tensor:
    """Collective. Return the workers' rows in the order of ranks."""
    with _named(name):
        return _ALLGATHER(rows, name=name, ignore_name_scope=True, process_set_id=0)


def _named(name: str) -> Any:
    return nullcontext() if tf.executing_eagerly() else marked(name)


def _checked(tensor: Tensor, **options: Any) -> Tensor:
    """Collective. Do Horovod's allgather, which in a loss of several workers is refused."""
    refuse_horovods_own(not options.get("process_set_id"))
    return _ALLGATHER(tensor, **options)


_LIBRARY.horovod_allgather = _checked
COLLECTIVES = partial(
    Collectives,
    hvd=hvd,
    to_tensor=tf.constant,
    is_under_way=lambda: False,  # steps wait for what they begin
    on_host=partial(tf.device, "CPU"),
)
