"""How TensorFlow's gradients are summed over workers: one class for each way, chosen from a table."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from hvdtrain.backends.base import PortableState
from hvdtrain.config import Config

Tensor = Any
Variable = Any


class GradientReducer(Protocol):
    """Sums gradients over workers. Each gradient is this worker's part of the mean already."""

    def attach(self, parameters: Mapping[str, Variable]) -> None:
        """Watch the parameters, by name, whose gradients will be reduced. Local: no collective.

        Called again, it forgets whatever a step that failed has begun.
        """
        ...

    def finish(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Collective. Return the sum of each gradient over workers; called while a step is traced.

        Args:
            gradients: one for each attached parameter, in the same order, dense.
        """
        ...

    def state(self) -> PortableState:
        """Return what the reducer keeps from step to step, such as error feedback; may differ by rank."""
        ...

    def load(self, state: PortableState) -> None:
        """Restore what ``state`` returned."""
        ...

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        ...


class AllReduce:
    """One all-reduce for each parameter, begun when the graph has computed its gradient.

    With fp16, each gradient is multiplied by the number of workers before it is cast, and the sum is
    divided by it: gradients are parts of the mean over all workers, which get smaller as workers are
    added, and fp16 has few digits below 6e-5. For powers of two this changes nothing else. A loss scale
    has multiplied them already.

    Args:
        size: number of workers.
        passes: backward passes per step; of no use here, a traced step has summed them.
        scaled: whether a loss scale has multiplied the gradients by the number of workers.
        fp16: whether floating-point gradients travel as fp16.
    """

    def __init__(self, size: int, passes: int = 1, scaled: bool = False, *, fp16: bool = False) -> None:
        self._size = size
        self._fp16 = fp16
        self._factor = 1 if scaled else size

    def attach(self, parameters: Mapping[str, Variable]) -> None:
        """Do nothing: the graph begins each all-reduce when it can."""

    def finish(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Collective. Return the sum of each gradient over workers."""
        if self._size == 1:
            return list(gradients)
        return [self._reduce(gradient, index) for index, gradient in enumerate(gradients)]

    def state(self) -> PortableState:
        """Return nothing: a sum keeps nothing from step to step."""
        return {}

    def load(self, state: PortableState) -> None:
        """Restore nothing."""

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        return "fp32, sent " + ("as fp16" if self._fp16 else "uncompressed")

    def _reduce(self, gradient: Tensor, index: int) -> Tensor:
        # Without a mark of its own, TensorFlow merges the all-reduces of gradients that are equal on
        # this worker, for which others that have two would wait.
        mark = {"_hvdtrain_gradient": AttrValue(i=index)}
        name = f"hvdtrain.gradient.{index}"
        with tf.compat.v1.get_default_graph()._attr_scope(mark):
            if not (self._fp16 and gradient.dtype.is_floating):
                return hvd.allreduce(gradient, op=hvd.Sum, name=name)
            small = tf.cast(gradient * self._factor, tf.float16)
            total = hvd.allreduce(small, op=hvd.Sum, postscale_factor=1 / self._factor, name=name)
            return tf.cast(total, gradient.dtype)


# by the config's compression: number of workers, backward passes per step, whether a loss scale has
# multiplied the gradients by the number of workers -> the reducer
REDUCERS: dict[str, Callable[[int, int, bool], GradientReducer]] = {
    "none": AllReduce,
    "fp16": partial(AllReduce, fp16=True),
}


def choose_reducer(config: Config, size: int) -> GradientReducer:
    """Return the reducer that a config asks for.

    Args:
        config: the job's config; its ``compression``, ``accumulate`` and ``precision`` are used.
        size: number of workers.
    """
    return REDUCERS[config.compression](size, config.accumulate, config.precision == "fp16")
