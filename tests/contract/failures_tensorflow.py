"""How a reduction of TensorFlow fails, for ``suite_transaction.py``."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError


class Failures:
    """Every reduction is a place that may fail. Those of a traced step are put in the order of their trace.

    So workers have begun the same reductions when one fails, and none waits for another in vain.
    """

    def __init__(self, monkeypatch):
        self._at, self._next = None, 0
        self._workers = None
        self._places = {}  # number of each reduction of a step, by its name
        self._last = {}  # by graph, what a reduction waits for
        self._allreduce = hvd.allreduce
        monkeypatch.setattr(hvd, "allreduce", self._may_fail)

    def fail(self, number):
        self._at, self._next = number, 0

    def settle(self, backend):
        backend.workers.barrier()

    def extra(self, backend):
        left_out = {id(v) for v in backend.parts.computation.seed_states}  # each step sets them
        left_out |= {id(field.variable) for field in backend._state.model.fields}
        left_out |= {id(one.iterations) for one in backend.optimizers}  # read by no update of SGD
        found = [v for v in [*backend.parts.slots, *backend.model.variables] if id(v) not in left_out]
        return {f"{place}/{v.name}": v.numpy() for place, v in enumerate(found)}

    def loss_scale(self, backend):
        scale = backend.parts.loss_scale
        return {} if scale is None else {str(i): float(v.numpy()) for i, v in enumerate(scale.variables)}

    def set_loss_scale(self, backend, value):
        backend.parts.loss_scale.value.assign(value)

    def resize(self, backend, size):
        workers = self._workers = backend.workers
        workers.rank = hvd.rank() if size > 1 else 0
        workers.size = size

    def _may_fail(self, tensor, *, name, **arguments):
        if tf.executing_eagerly():
            number, self._next = self._next, self._next + 1
            self._check(number)
            return self._allreduce(tensor, name=name, **arguments)
        graph = tf.compat.v1.get_default_graph()
        number = self._places.setdefault(f"{graph.get_name_scope()}/{name}", len(self._places))
        with tf.control_dependencies(self._last.get(id(graph), [])):
            is_alone = tf.numpy_function(lambda: self._check(number), [], tf.bool)
        reduced = tf.cond(
            is_alone,
            lambda: tf.identity(tensor),
            lambda: self._allreduce(tensor, name=name, **arguments),
        )
        self._last[id(graph)] = [reduced]
        return reduced

    def _check(self, number):
        """Fail if it is this place's turn; return whether this worker is alone."""
        if number == self._at:
            raise HorovodInternalError("a worker was lost, for a test")
        return np.asarray(self._workers is not None and self._workers.size == 1)
