"""The workers of a job as a traced step sees them: what may change while the job runs is a variable."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.workers.agreement import Workers

Tensor = Any


# what a sum over workers depends on, such as what follows here: size, may_reduce, is_elastic
Sized = Any


class FixedSize(NamedTuple):
    """A number of workers that does not change."""

    size: int
    is_elastic: bool = False

    @property
    def may_reduce(self) -> bool:
        """Whether steps hold collectives."""
        return self.size > 1


class TracedWorkers:
    """The workers of a job, for steps that are traced once and run in every world.

    In an elastic job rank and size are variables, and steps hold their collectives in a world of one, too.
    """

    def __init__(self, workers: Workers) -> None:
        self.most, self.is_elastic, self.may_reduce = workers.most, workers.is_elastic, workers.may_reduce
        self.workers = workers
        if self.is_elastic:
            self._size = tf.Variable(float(workers.size), trainable=False, name="workers")
            self._rank = tf.Variable(workers.rank, trainable=False, name="rank", dtype=tf.int32)

    @property
    def size(self) -> Any:
        """Number of workers: an int, or in an elastic job a tensor of type float32."""
        return self._size.read_value() if self.is_elastic else self.workers.size

    @property
    def local_size(self) -> int:
        """Number of workers on this host."""
        return self.workers.local_size

    @property
    def rank(self) -> Any:
        """The rank of this worker: an int, or in an elastic job a tensor of type int32."""
        return self._rank.read_value() if self.is_elastic else self.workers.rank

    def enter_world(self) -> None:
        """Take rank and size anew. Local: no collective."""
        if self.is_elastic:
            # Python numbers would be kept by TensorFlow for ever
            self._size.assign(np.asarray(self.workers.size, np.float32))
            self._rank.assign(np.asarray(self.workers.rank, np.int32))
