"""A task's own training step in TensorFlow: the optimizers that it is given, and how it is run.

``torch/own_step.py`` does the same for PyTorch; the rules are in ``backends/own_step.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdtrain.backends.optimizers import check_named_optimizers, check_owners, combined_rates
from hvdtrain.backends.own_step import (
    Optimizers,
    Step,
    StepPart,
)
from hvdtrain.backends.records import OwnRates
from hvdtrain.backends.tensorflow.functions import Phase
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.steps.optimizers import take_own_rates
from hvdtrain.backends.tensorflow.steps.step_number import StepNumber
from hvdtrain.backends.tensorflow.steps.step_optimizer import Calls, StepOptimizer
from hvdtrain.backends.tensorflow.traced_workers import TracedWorkers
from hvdtrain.config import Config
from hvdtrain.errors import TaskError

Tensor = Any
NamedOptimizers = dict[str, tuple[keras.optimizers.Optimizer, list[Field]]]


def make_optimizers(task: Any, model: keras.Model, tensors: ModelState) -> NamedOptimizers:
    """Make the optimizers of a task that names several, each with the parameters that it trains.

    Args:
        task: the task, which has ``tf_optimizers``.
        model: the model.
        tensors: the model's variables.

    Raises:
        TaskError: If it gives something else, or not exactly one of them trains each trainable parameter.
    """
    method, given = "tf_optimizers", task.tf_optimizers(model)
    pairs = given if isinstance(given, Mapping) else {}
    for name, pair in pairs.items():
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], list | tuple)):
            raise TaskError(
                f"{method}(model) must give an optimizer and the list of the variables that it trains as "
                f"{name!r}, found a {type(pair).__name__}",
                f'Return {{"{name}": (keras.optimizers.Adam(1e-4), model.{name}.trainable_variables)}}, for '
                "example.",
            )
    optimizers = {name: pair[0] for name, pair in pairs.items()} or given
    by_name = check_named_optimizers(optimizers, keras.optimizers.Optimizer, method)
    if len(set(map(id, by_name.values()))) < len(by_name):
        raise TaskError(f"{method}(model) gave one optimizer under two names", "Make one for each name.")
    known = {id(field.variable) for field in tensors.fields}
    fields = {id(field.variable): field for field in tensors.trainable_fields()}
    variables = {name: {id(v): v for v in pairs[name][1]} for name in by_name}
    owned = {name: [fields[i] for i in ids if i in fields] for name, ids in variables.items()}
    check_owners(
        method,
        [field.name for field in fields.values()],
        {name: [field.name for field in of_one] for name, of_one in owned.items()},
        {
            name: sum(v.trainable and i not in known for i, v in ids.items())
            for name, ids in variables.items()
        },
    )
    return {name: (optimizer, owned[name]) for name, optimizer in by_name.items()}


def take_rates(
    optimizers: Mapping[str, keras.optimizers.Optimizer], method: str
) -> tuple[OwnRates, dict[str, float]]:
    """Return the learning rates of a task's optimizers, and what the largest is multiplied by for each.

    Args:
        optimizers: the optimizers, by name.
        method: the task's method that made them.

    Raises:
        TaskError: as ``take_own_rates``.
    """
    return combined_rates({name: take_own_rates(one, method) for name, one in optimizers.items()})


class OwnStep:
    """A task's own training step.

    Args:
        step: what the task does in a step.
        optimizers: its optimizers, by name, built, with the parameters that they train.
        factors: what the learning rate of each is multiplied by, if not by 1.
        config: the config.
        workers: the job's workers.
    """

    def __init__(
        self,
        step: Step,
        optimizers: NamedOptimizers,
        factors: Mapping[str, float],
        config: Config,
        *,
        workers: TracedWorkers,
    ) -> None:
        self._step = step
        self._workers = workers
        self._calls = Calls(list(optimizers), workers)
        self._optimizers = {
            name: StepOptimizer(
                name, optimizer, fields, config, self._calls, factor=factors.get(name, 1.0), workers=workers
            )
            for name, (optimizer, fields) in optimizers.items()
        }
        self._given = Optimizers(self._optimizers)

    def begin(self, samples: StepPart | None = None) -> None:
        """Begin a step; without samples, forget whatever one that failed has begun. Local: no collective."""
        self._calls.begin()
        for optimizer in self._optimizers.values():
            optimizer.begin(samples)

    def run(
        self, phase: Phase, batch: Mapping[str, Tensor], number: StepNumber, samples: StepPart
    ) -> tuple[Any, dict[str, Any]]:
        """Collective. Do the task's step and return its loss and its metrics.

        In a dry run, which has no learning rate, nothing is reduced or updated.

        Args:
            phase: the model.
            batch: the samples.
            number: the number of the step.
            samples: their weights, and what else an update needs.
        """
        self._given.step = number
        self.begin(samples)
        try:
            result = self._step(phase, batch, self._given)
        finally:
            for optimizer in self._optimizers.values():
                optimizer.begin(None)
        if phase.added_loss() is not None:
            raise TaskError(
                "the model adds losses of its own (add_loss or regularizers), and the task's own step does "
                "not read them",
                "Add tf.add_n(model.losses) to the losses that are minimized.",
            )
        return result

    def unused(self) -> list[str]:
        """Return the names of the parameters that no gradient of the last step has reached."""
        return [name for optimizer in self._optimizers.values() for name in optimizer.unused]

    def not_applied(self) -> list[str]:
        """Return the optimizers that took no step in the last step."""
        return [name for name, optimizer in self._optimizers.items() if not optimizer.is_applied]

    def error_of(self, error: Exception) -> TaskError | None:
        """Return the error for workers whose calls differ, if that is what an exception of a step says."""
        return self._calls.error_of(error)

    def reduce(self, vector: Tensor, names: Sequence[str], weighted: Sequence[str]) -> Tensor:
        """Collective. Sum the step's vector over workers and return it.

        Args:
            vector: the sums of the loss and the metrics, and what follows them.
            names: "loss" and the metrics.
            weighted: those of them that are Weighted.
        """
        if self._workers.may_reduce:
            with tf.control_dependencies(self._calls.announce_end(names, weighted)):
                vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")
        return vector
