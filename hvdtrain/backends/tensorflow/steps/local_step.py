"""The step of local SGD: each worker trains alone, and then they are made equal. ``torch/`` has the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.reduction.local_steps import OUTER_PREFIX, LocalStepBase, LocalSums, in_parts
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch, TensorFlowPending
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.state.model_state import Field
from hvdtrain.backends.tensorflow.steps.parts import Parts
from hvdtrain.backends.tensorflow.steps.plain_step import PlainStep
from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers

Tensor = Any
Variable = Any


class LocalStep(LocalStepBase, PlainStep):
    """A step of this worker alone; ``synchronize`` makes the workers equal."""

    pending = TensorFlowPending

    def __init__(self, task: Any, config: Config, workers: Workers) -> None:
        super().__init__(task, config, workers)
        self.near = self.computation.near

    def attach(self, parts: Parts) -> None:
        """Take the parts of the step. Local: no collective."""
        super().attach(parts)
        optimizer, fields = parts.optimizers[MAIN], parts.trainable
        self._parameters = [native(field.variable) for field in fields]
        self._steps = optimizer.iterations
        self._averaged = [*self._parameters, *_slots_of(optimizer)]
        kept = self._parameters if parts.config.outer_optimizer == "nesterov" else []
        self._starts = [tf.Variable(p, trainable=False, name="start") for p in kept]
        self.momenta = [tf.Variable(tf.zeros_like(p), trainable=False, name="outer") for p in kept]
        self.fields: list[Field] = [
            replace(field, variable=momentum, trainable=False, prefix=OUTER_PREFIX)
            for field, momentum in zip(fields, self.momenta, strict=False)
        ]
        self._steps_before = 0
        self._traced = tf.function(self._synchronize, autograph=False)

    def average(self, share: Tensor) -> None:
        """Do nothing: ``synchronize`` takes the weights into their moving average."""

    def _run(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> Any:
        vector, known = self.run(batch, learning_rate, signals)
        return vector, *known

    def _note_start(self) -> None:
        self._steps_before = int(self._steps.numpy())
        for start, parameter in zip(self._starts, self._parameters, strict=False):
            start.assign(parameter)

    def _synchronized(self, sums: LocalSums) -> Tensor:
        share = np.asarray(sums.ema_share(self.parts.ema.decay), np.float32)  # TensorFlow would keep a number
        vector = self._traced(sums.vector, tf.constant(share))
        self._agree(sums.steps)
        return vector

    def _zero(self, momentum: Variable) -> None:
        momentum.assign(tf.zeros_like(momentum))

    def _synchronize(self, vector: Tensor, share: Tensor) -> Tensor:
        """Collective. Average, take the outer step, take the weights into their average; traced."""
        vector = self._make_equal(vector)
        if self.momenta:
            self._step()
        self.parts.ema.update(share)
        return vector

    def _make_equal(self, vector: Tensor) -> Tensor:
        """Collective. Make parameters and slots equal, in place; return the sum of a vector."""
        if self.workers.size == 1:
            return vector
        parts = in_parts([(v.dtype.name, v.shape.num_elements() * v.dtype.size) for v in self._averaged])
        for number, places in enumerate(parts):
            variables = [self._averaged[place] for place in places]
            flat = tf.concat([tf.reshape(variable.read_value(), [-1]) for variable in variables], 0)
            flat = hvd.allreduce(flat, op=hvd.Average, name=f"hvdtrain.local.{number}")
            means = tf.split(flat, [variable.shape.num_elements() for variable in variables])
            for variable, mean in zip(variables, means, strict=True):
                variable.assign(tf.reshape(mean, variable.shape))
        return hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")

    def _step(self) -> None:
        """Let the outer optimizer take its step, from where the local steps started."""
        momentum, rate = self.parts.config.outer_momentum, self.parts.config.outer_learning_rate
        for parameter, start, kept in zip(self._parameters, self._starts, self.momenta, strict=True):
            gradient = start.read_value() - parameter.read_value()
            velocity = kept.read_value() * momentum + gradient
            kept.assign(velocity)
            parameter.assign(start.read_value() - (gradient + velocity * momentum) * rate)

    def _agree(self, steps: int) -> None:
        """Collective with fp16. Take the most steps counted by a worker, and the lowest loss scale of all."""
        # with fp16 each worker skips steps by itself; otherwise one without samples has not counted the last
        if self.parts.loss_scale is None:
            self._steps.assign(self._steps_before + steps)
            return
        variables = self.parts.loss_scale.variables
        own = tuple(float(variable.numpy()) for variable in variables), int(self._steps.numpy())
        gathered = self.workers.allgather_object(own)
        for variable, value in zip(variables, min(scale for scale, _ in gathered), strict=True):
            variable.assign(np.asarray(value).astype(variable.dtype.as_numpy_dtype))
        self._steps.assign(max(counted for _, counted in gathered))


def _slots_of(optimizer: Any) -> list[Variable]:
    """Return what an optimizer keeps for parameters, without its count of steps."""
    others = {id(optimizer.learning_rate), id(optimizer.iterations)}
    return [native(variable) for variable in optimizer.variables if id(variable) not in others]
