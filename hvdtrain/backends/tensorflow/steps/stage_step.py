"""The step of a worker that has a stage of a split model. ``torch/`` has the same."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.pipeline.checks import blocks_of
from hvdtrain.backends.pipeline.stage_step import StageStepBase, StateOfStage
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.step_metrics import findings
from hvdtrain.backends.tensorflow.batches import FixedSize, TensorFlowBatch
from hvdtrain.backends.tensorflow.functions import marked, scaled_to_norm
from hvdtrain.backends.tensorflow.reduction.broadcast import broadcast_variables
from hvdtrain.backends.tensorflow.state.layer_state import LayerState
from hvdtrain.backends.tensorflow.state.model_state import ModelState
from hvdtrain.backends.tensorflow.steps import stage_passes
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.steps.plain_step import Parts, PlainStep
from hvdtrain.backends.tensorflow.steps.update import Update
from hvdtrain.backends.tensorflow.sync_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends.tensorflow.task_model import float_bits_of, make_model, precision_of, take_loss
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import ConfigError
from hvdtrain.workers.agreement import WorkerPlace

Tensor = Any


class StagedState(StateOfStage, TrainingState):
    """Model and optimizer of one stage as a part of a portable state; the arguments are its bases'."""

    def replicated(self) -> Iterator[tuple[str, Any]]:
        """Return all tensors that replicas have, with the path of the model's tensor that they belong to."""
        return (
            (field.path, field.variable) for field in [*self.model.fields, *self.ema.fields, *self._slots]
        )

    copy = staticmethod(broadcast_variables)


class StagedUpdate(Update):
    """The update of a step of a split model: this worker updates the parameters of its stage."""

    def __init__(self, parts: Parts, layout: WorkerPlace, counted_elsewhere: Collection[str]) -> None:
        self._layout, self._counted_elsewhere = layout, counted_elsewhere
        self._squared_norm = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="squared_norm")
        super().__init__(parts)
        self._workers = FixedSize(layout.workers.size)

    def clip(self, gradients: list[Tensor], clip_norm: float) -> tuple[list[Tensor], Tensor]:
        """Collective. Scale the gradients of all stages to a joint norm; return also what it was."""
        squares = [
            tf.reduce_sum(tf.square(tf.cast(gradient, tf.float64)))
            for field, gradient in zip(self._fields, gradients, strict=True)
            if field.path not in self._counted_elsewhere
        ]
        # of a constant, TensorFlow would work out the sum when it compiles the step (see ``dense``)
        own = tf.add_n([tf.cast(self._zero.read_value(), tf.float64), *squares])
        # every replica adds the same
        total = hvd.allreduce(own, op=hvd.Sum, name="hvdtrain.gradient_norm") / self._layout.replicas
        # nothing else needs it in a stage without gradients: TensorFlow would leave out what others wait for
        self._squared_norm.assign(total)
        norm = tf.sqrt(total)
        return scaled_to_norm(gradients, norm, clip_norm), norm

    def update(self, gradients: list[Tensor], learning_rate: Tensor) -> None:
        """Let the optimizer take its step, if this stage has parameters."""
        if gradients:
            super().update(gradients, learning_rate)

    def _with_reached(self, vector: Tensor) -> Tensor:
        return vector  # which has the same numbers in all stages

    def _without_reached(self, vector: Tensor) -> Tensor:
        return vector


class StageStep(StageStepBase, PlainStep):
    """The part of a step that a worker with a stage of the model does; the arguments are ``PlainStep``'s."""

    framework, on_host, zeros = "tf", staticmethod(np.asarray), staticmethod(tf.zeros)
    module, parts_of_stage = stage_passes, (StagedState, StagedUpdate)
    state: StagedState

    @staticmethod
    def finish_with(finish: Callable[[], list[Tensor]], vector: Tensor) -> tuple[list[Tensor], Tensor]:
        """Collective. Return what a function does, and the sum of a vector over all workers."""
        sums = finish()
        with marked("hvdtrain.metrics"):
            return sums, hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")

    def make_model(self, batch: HostBatch | None) -> Any:
        """Collective. Make this worker's stage of the task's model; return its variables."""
        task, config, computation = self._task, self._config, self.computation
        model = self._whole = make_model(task, config)
        computation.precision = precision_of(model, config.precision)
        if computation.precision == "fp16":
            raise ConfigError(
                f"stages {config.stages} cannot be used with layers that compute in float16 (mixed_float16)",
                "Use mixed_bfloat16, or leave out stages.",
                everywhere=True,
            )
        blocks = blocks_of(task, model, "tf", stage_passes.layers_of(model), bool(take_loss(model)))
        whole = ModelState(model, Renaming(task, "tf"))
        parameters = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
        own, tensors = self.divide(model, blocks, whole, batch, parameters)
        computation.layer_state = LayerState(model)
        if computation.layer_state:
            raise ConfigError(
                f"stages: the layer {computation.layer_state.paths[0]} loads its state itself",
                "Compute it in train_data(), or leave out stages.",
                everywhere=True,
            )
        computation.batch_norm = BatchNormSync(self.near)
        self.batch_norms = len(find_batch_norms(model))
        computation.batch_norm.take_over(model, every=config.sync_batch_norm)
        computation.model = stage_passes.StageModel(own)
        stage_passes.free_others(whole, own)
        computation.seed_states = [v for v in computation.model.variables if v.name == "seed_generator_state"]
        computation.called = None
        computation.wrap.float_bits = float_bits_of(computation.model)
        return tensors

    def first_of(self, batch: HostBatch) -> dict[str, Tensor]:
        """Return the first micro-batch of a batch."""
        arrays = self.computation.wrap(batch).arrays
        return arrays if len(batch.weights) == 1 else {name: array[0] for name, array in arrays.items()}

    def trace(self) -> None:
        """Let what steps call be traced anew, when the next batch comes."""
        self.passes = stage_passes.StagePasses(self, self._whole)
        self._update_function = tf.function(self._traced_update, autograph=False)

    def broadcast(self, root: int) -> None:
        """Collective. Copy the variables of the first replica to the others."""
        self.state.broadcast([self.parts.optimizers[MAIN].iterations])

    def run(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> Any:
        """Collective. Do a step; return its vector, the names in it and the parameters without a gradient."""
        rate = tf.constant(np.asarray(learning_rate, np.float32))
        computation, passes = self.computation, self.passes
        passes.begin(batch, training=True)
        passes.train(len(batch.samples.weights))
        form = self.agreed_form(True)
        sums = self.own_sums(passes.sums, form)
        unused = list(computation.unused)
        vector = self._update_function(
            *(passes.gradients, sums, batch.total, rate, self.parts.ema.share(batch.step + 1)),
            *(computation.numbers(signals), tf.constant(np.asarray(len(unused), np.float32))),
        )
        passes.begin(batch, training=True)  # frees the gradients
        return vector, (*form, unused)

    def _traced_update(self, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        """Collective. Do the update of a step with the gradients of its micro-batches; return its vector."""
        sums, total_weight, learning_rate, share, signals, unused = tensors
        vector = tf.concat([sums, findings(unused), signals], 0)
        vector = self.update.apply(gradients, vector, self.forms[True], total_weight, learning_rate)
        self.update.ema(share)
        return vector
