"""The step of a worker that has a stage of a split model. ``torch/`` has the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import sample_values
from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.pipeline.checks import (
    gives_blocks,
    loss_has_parameters,
)
from hvdtrain.backends.pipeline.groups import Layout
from hvdtrain.backends.pipeline.pipeline import Blocks, Call
from hvdtrain.backends.pipeline.stage_step import Form, StageStepBase
from hvdtrain.backends.pipeline.state import check_one_owner
from hvdtrain.backends.portable.initial_values import has_initial_value
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.step_metrics import FINDINGS, PendingVector
from hvdtrain.backends.tensorflow.activations import ActivationMeter
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch, TensorFlowPending
from hvdtrain.backends.tensorflow.computation import Computation
from hvdtrain.backends.tensorflow.objective.evaluation import HorovodCollectives
from hvdtrain.backends.tensorflow.precision import float_bits_of, precision_of
from hvdtrain.backends.tensorflow.stages.model import (
    StageModel,
    blocks_of,
    bytes_of,
    call_of,
    check_blocks,
    check_it_draws_nothing,
    form_of,
    free_others,
    give_memory,
    owners_of,
    parameters_without_memory,
    seconds_of,
)
from hvdtrain.backends.tensorflow.stages.passes import StagePasses
from hvdtrain.backends.tensorflow.state.layer_state import LayerState
from hvdtrain.backends.tensorflow.state.model_state import ModelState
from hvdtrain.backends.tensorflow.steps.staged_update import StagedState, StagedUpdate
from hvdtrain.backends.tensorflow.sync_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends.tensorflow.task_model import make_model, take_loss
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.errors import ConfigError
from hvdtrain.workers.agreement import Workers

Tensor = Any


class StageStep(StageStepBase):
    """The part of a step that a worker with a stage of the model does.

    Args:
        task: the task.
        config: the config.
        workers: the job's workers.
    """

    collectives, pending, state_kind, hvd = HorovodCollectives, TensorFlowPending, StagedState, hvd
    state: StagedState

    def __init__(self, task: Any, config: Config, workers: Workers) -> None:
        super().__init__(config, workers)
        self._task, self._config = task, config
        self.computation = Computation(task, config, workers)

    def make_model(self, batch: HostBatch | None) -> ModelState:
        """Collective. Make this worker's stage of the task's model; return its variables."""
        task, config, computation = self._task, self._config, self.computation
        computation.precision = config.precision
        model, blocks, is_whole = self._whole_model()
        if take_loss(model):
            raise loss_has_parameters()
        self.form = form_of(model)
        whole = ModelState(model, Renaming(task, "tf"))
        owners_of(whole.fields, [blocks])  # each parameter is in one
        seen = batch if is_whole else None
        division = self._division(model, blocks, seen, is_given=gives_blocks(task, "tf"))
        self._firsts = division.firsts(config, self.workers)
        stages = division.of_stages(self._firsts)
        own = stages[self.layout.stage]
        give_memory(own)
        owners = owners_of(whole.fields, stages)
        is_own = self.split(
            whole.fields, whole.trainable_fields(), owners, len(blocks), lambda field: [field.path]
        )
        parameters = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
        check_one_owner(
            {f.path: self.owners[f.path] for f in whole.fields if id(f.variable) not in parameters}
        )
        tensors = whole.part(is_own)
        computation.layer_state = LayerState(model)
        if computation.layer_state:
            raise ConfigError(
                f"stages {config.stages} cannot be used with the layer {computation.layer_state.paths[0]}, "
                "which loads its state itself",
                "Compute it in train_data(), or leave out stages.",
                everywhere=True,
            )
        computation.precision = precision_of(model, config.precision)
        computation.batch_norm = BatchNormSync(self.groups.own)
        self._batch_norms = len(find_batch_norms(model))
        computation.batch_norm.take_over(model, every=config.sync_batch_norm)
        computation.model = StageModel(own)
        free_others(whole, own)
        computation.seed_states = [v for v in computation.model.variables if v.name == "seed_generator_state"]
        computation.called = None
        computation.wrap.float_bits = float_bits_of(computation.model)
        return tensors

    def begin_updates(self, shared: Mapping[str, tuple[GradientReducer, bool]]) -> None:
        """Make the update of the stage and its passes."""
        parts = self.parts
        self.update = StagedUpdate(
            self.layout,
            shared,
            parts.trainable,
            parts.named[MAIN][0],
            parts.reducer,
            parts.ema,
            parts.clock,
            workers=self.near,
            clip_norm=parts.config.clip_norm,
            loss_scale=parts.loss_scale,
        )
        self.trace()

    def trace(self) -> None:
        """Let what steps call be traced anew, when the next batch comes."""
        self.passes = StagePasses(self.computation, self.layout, self.form, self.update)
        self._function = tf.function(self._traced, autograph=False)

    def broadcast(self, root: int) -> None:
        """Collective. Copy the variables of the first replica to the others."""
        parts = self.parts
        self.state.broadcast([parts.named[MAIN][0].iterations, *parts.scale_variables])

    def train(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Collective. Do a step."""
        rate = tf.constant(np.asarray(learning_rate, np.float32))
        computation, passes = self.computation, self.passes
        passes.begin(batch, training=True)
        self.pipeline.train(passes, len(batch.samples.weights))
        names, weighted = self.agreed_form(True)
        sums = passes.sums if passes.sums is not None else tf.zeros(len(names) + len(weighted))
        unused = list(computation.unused)
        vector = self._function(
            *(passes.gradients, sums, batch.total, rate, self.parts.ema.share(batch.step + 1)),
            *(computation.numbers(signals), tf.constant(np.asarray(len(unused), np.float32))),
        )
        passes.begin(batch, training=True)  # frees the gradients
        return TensorFlowPending(names, vector, batch.total_weight, unused, weighted)

    def zeros(self, count: int) -> Tensor:
        """Return a vector of zeros."""
        return tf.zeros(count)

    def summed(self, own: Tensor, signals: Sequence[float]) -> Tensor:
        """Collective. Return the vector of an evaluation, summed over workers, of this worker's sums."""
        vector = tf.concat([own, FINDINGS * [0.0], self.computation.numbers(signals)], 0)
        with peer_errors():
            return hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.eval_metrics")

    def dry_run(
        self, batch: TensorFlowBatch, training: bool, meter: ActivationMeter, draws: list[str]
    ) -> dict[str, NDArray[Any]]:
        """Collective. Return loss and metrics of the first micro-batch, by name; the last stage has them."""
        computation, passes = self.computation, self.passes
        passes.begin(batch, training=training)
        if training:
            others = self._not_of_batch_norms()
            before = [variable.numpy() for variable in others]
            self.pipeline.train(passes, 1)
            meter.take_graph(passes.gradients or ())
            moved = [
                v.path for v, old in zip(others, before, strict=True) if not np.array_equal(v.numpy(), old)
            ]
            if not self.layout.is_last and self._config.accumulate > 1:
                self.notes.append(_moves(moved, self.layout))
        else:
            self.pipeline.evaluate(passes)
            if self.layout.is_last:
                rows = batch.samples.rows(0, passes.samples(0))
                computation.evaluation.try_out(passes.taken(), rows)
            self.pipeline.messenger.flush()
        if passes.last_values is None:
            return {}
        rows, weights = passes.last_values
        return sample_values(computation.names, computation.weighted, rows.numpy(), weights.numpy())

    def own_form(self, training: bool) -> Form:
        """Return the names of the sums, as they were when a pass of this kind was traced last."""
        found: Form = self.passes.forms.get(training, ((), ()))
        return found

    def _traced(  # noqa: PLR0917 - tensors, by position as a compiled step is called
        self,
        gradients: list[Tensor],
        sums: Tensor,
        total_weight: Tensor,
        learning_rate: Tensor,
        share: Tensor,
        signals: Tensor,
        unused: Tensor,
    ) -> Tensor:
        """Collective. Do the update of a step with the gradients of its micro-batches; return its vector."""
        vector = tf.concat([sums, [unused, 0.0], signals], 0)
        vector = self.update.apply(gradients, vector, self.forms[True], total_weight, learning_rate)
        self.update.ema(share)
        return vector

    def _whole_model(self) -> tuple[keras.Model, list[Any], bool]:
        """Return the task's model, its blocks and whether its variables have their values.

        With ``stage_balance`` memory and initial values by name, it is made without memory for variables, if
        these values are known of all parameters.
        """
        task, config = self._task, self._config
        if config.stage_balance == "memory" and config.initial_parameters == "portable":
            try:
                with parameters_without_memory() as are_changed:
                    model = make_model(task, config)
                    blocks = blocks_of(task, model)
                fields = list(ModelState(model, Renaming(task, "tf")).trainable_fields())
            except Exception:  # it uses values of variables; another error is raised below
                fields = []
            if fields and not are_changed() and all(has_initial_value(f.name, f.shape) for f in fields):
                return model, blocks, False
            # it is made again with the same names of layers and the same seed
            keras.utils.clear_session(free_memory=False)
            keras.utils.set_random_seed(mix(config.seed, 0) >> 33)
        model = make_model(task, config)
        return model, blocks_of(task, model), True

    def _division(
        self, model: keras.Model, blocks: Sequence[Any], batch: HostBatch | None, is_given: bool
    ) -> Blocks:
        """Return what divides the blocks of a model."""

        def call() -> Call | None:
            if batch is None:
                return None
            wrapped = self.computation.wrap(batch)
            arrays = wrapped.arrays
            if len(wrapped.weights.shape) > 1:
                arrays = {name: array[0] for name, array in arrays.items()}
            once, again = (
                call_of(self.computation.train_objective, arrays, self.form, StageModel([])) for _ in range(2)
            )
            check_it_draws_nothing(once, again)
            return once

        def check(call: Call) -> None:
            if is_given:
                self.notes.append(check_blocks(blocks, model, *call))

        return Blocks(blocks, call, check, lambda call: seconds_of(blocks, *call), lambda: bytes_of(blocks))

    def _not_of_batch_norms(self) -> list[Any]:
        """Return the variables that a forward pass may move, without the statistics of batch norm."""
        norms = find_batch_norms(self.computation.model).values()
        left_out = {id(variable) for layer in norms for variable in layer.variables}
        left_out |= {id(variable) for variable in self.computation.model.trainable_variables}
        left_out |= {id(state) for state in self.computation.seed_states}
        return [variable for variable in self.computation.model.variables if id(variable) not in left_out]


def _moves(paths: Sequence[str], layout: Layout) -> str:
    """Return what follows for a stage before the last from what its forward passes move; empty if nothing."""
    if not paths:
        return ""
    return (
        f"the forward passes of stage {layout.stage + 1} move {', '.join(paths[:3])}"
        f"{' and others' if len(paths) > 3 else ''}; outputs in training that depend on it are computed with "
        f"values up to {layout.stages - layout.stage} micro-batches old, which is not the curve of one worker"
    )
