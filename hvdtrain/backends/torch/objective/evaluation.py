"""Metrics of a whole evaluation in PyTorch; as in ``tensorflow/objective/evaluation.py``."""

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvdtrain.backends.objective.metric_states import Collectives
from hvdtrain.backends.objective.named_metrics import MetricFunctions
from hvdtrain.backends.torch.objective.losses import classes_last, cross_entropy
from hvdtrain.backends.torch.objective.metric_objects import as_array, object_states


class HorovodCollectives(Collectives):
    """How objects, as bytes, and the states of metrics move between workers."""

    hvd = hvd
    to_tensor = staticmethod(torch.from_numpy)

    def is_under_way(self) -> bool:
        """Return whether this worker began an operation that it has not waited for: Horovod keeps those."""
        return bool(mpi_ops._handle_map)


FUNCTIONS = MetricFunctions(
    "torch",
    as_array,
    object_states,
    cross_entropy,
    classes_last,
    argmax=lambda outputs: outputs.argmax(-1),
    mask_of=lambda outputs: None,
)
