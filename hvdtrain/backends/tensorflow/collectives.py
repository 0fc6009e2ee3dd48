"""Objects and states of metrics between workers in TensorFlow; see also ``torch/collectives.py``."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.pipeline.groups import group_of
from hvdtrain.backends.workers import Sized, peer_errors


class HorovodCollectives:
    """How objects, as bytes, and the states of metrics move between workers.

    Args:
        workers: some of the job's workers, among which they move; None for all.
    """

    def __init__(self, workers: Sized | None = None) -> None:
        self._workers = workers
        self._group = group_of(workers)

    def join(self, data: NDArray[np.uint8], name: str = "hvdtrain.objects") -> NDArray[np.uint8]:
        """Collective. Return the workers' bytes in the order of ranks, on every worker."""
        with peer_errors(), tf.device("CPU"):
            joined = hvd.allgather(tf.constant(data), name=name, **self._group)
        return np.asarray(joined.numpy())

    def is_under_way(self) -> bool:
        """Return whether this worker began an operation that it has not waited for: steps wait for theirs."""
        return False

    def sum(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """Collective. Return the sum of the workers' vectors."""
        with peer_errors(), tf.device("CPU"):
            summed = hvd.allreduce(
                tf.constant(vector), op=hvd.Sum, name="hvdtrain.metric_sums", **self._group
            )
        return np.asarray(summed.numpy())

    def gather(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Collective. Return the workers' bytes in the order of ranks on rank 0, and none on others."""
        splits = np.zeros(self._size(), np.int32)
        splits[0] = len(data)
        with peer_errors(), tf.device("CPU"):
            sent = tf.constant(data), tf.constant(splits)
            gathered, _ = hvd.alltoall(*sent, name="hvdtrain.metric_rows", **self._group)
        return np.asarray(gathered.numpy())

    def _size(self) -> int:
        return hvd.size() if self._workers is None else self._workers.size
