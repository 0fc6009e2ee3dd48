"""Metrics of a whole evaluation in TensorFlow; as in ``torch/objective/evaluation.py``."""

from functools import partial

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.objective.metric_states import Collectives
from hvdtrain.backends.objective.named_metrics import MetricFunctions
from hvdtrain.backends.tensorflow.objective.losses import classes_last, cross_entropy, mask_of
from hvdtrain.backends.tensorflow.objective.metric_objects import as_array, object_states


class HorovodCollectives(Collectives):
    """How objects, as bytes, and the states of metrics move between workers."""

    hvd = hvd
    to_tensor = staticmethod(tf.constant)
    on_host = staticmethod(partial(tf.device, "CPU"))

    def is_under_way(self) -> bool:
        """Return whether this worker began an operation that it has not waited for: steps wait for theirs."""
        return False


FUNCTIONS = MetricFunctions(
    "tf",
    as_array,
    object_states,
    cross_entropy,
    classes_last,
    argmax=partial(tf.argmax, axis=-1),
    mask_of=mask_of,
)
