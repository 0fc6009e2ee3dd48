"""The TensorFlow backend of a worker that has a stage of a split model."""

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import sample_values
from hvdtrain.backends.pipeline.checks import (
    describe_stages,
    gives_blocks,
    loss_has_parameters,
    shapes_of_stages,
)
from hvdtrain.backends.pipeline.groups import Layout, StageGroups, stages_that_share
from hvdtrain.backends.pipeline.staged import Blocks, Call, Form, Staged
from hvdtrain.backends.pipeline.state import check_one_owner
from hvdtrain.backends.portable.initial_values import has_initial_value
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.records import ModelInfo
from hvdtrain.backends.reduction import GradientReducer, choose_reducer
from hvdtrain.backends.step_metrics import FINDINGS, NO_SIGNALS, PartialSums, PendingVector
from hvdtrain.backends.tensorflow import backend
from hvdtrain.backends.tensorflow.activations import ActivationMeter
from hvdtrain.backends.tensorflow.backend import TensorFlowBackend
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch, TensorFlowPending
from hvdtrain.backends.tensorflow.objective.losses import masks_within
from hvdtrain.backends.tensorflow.precision import (
    LossScale,
    new_loss_scale,
    precision_of,
)
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
from hvdtrain.backends.tensorflow.stages.passes import StageBackend, StagePasses
from hvdtrain.backends.tensorflow.stages.update import StagedState, StagedUpdate
from hvdtrain.backends.tensorflow.state.layer_state import LayerState
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState
from hvdtrain.backends.tensorflow.sync_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends.tensorflow.task_model import make_model, take_loss
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import ConfigError

Tensor = Any


def start(
    config: Config, membership: Membership | None = None, ranks: Sequence[int] = ()
) -> TensorFlowBackend:
    """Collective. Start Horovod, bind this worker's device and set its threads.

    Raises:
        EnvironmentFault: If the device is missing or the launcher does not fit.
    """
    return backend.start(config, membership, ranks, TensorFlowStagedBackend)


class TensorFlowStagedBackend(Staged, StageBackend):
    """The TensorFlow backend of one worker, which has a stage of the model.

    Attributes:
        model: the layers of this worker's stage, after ``build``.
    """

    _state: StagedState

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Collective. Build this worker's stage of the model, optimizer and steps, with initial values."""
        self._enter(task, config)
        info = super().build(task, config, batch)
        return self._told(info)

    def train_step(
        self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float] = NO_SIGNALS
    ) -> PendingVector:
        """Collective. Do one optimizer update with the mean gradient over the global batch."""
        rate = tf.constant(np.asarray(learning_rate, np.float32))
        passes = self._passes
        with peer_errors():
            passes.begin(batch, training=True)
            self._pipeline.train(passes, _micro_batches(batch))
            names, weighted = self._agreed_form(True)
            sums = passes.sums if passes.sums is not None else tf.zeros(len(names) + len(weighted))
            unused = list(self._unused)
            vector = self._apply(
                *(passes.gradients, sums, batch.total, rate, self._ema.share(batch.step + 1)),
                *(self._numbers(signals), tf.constant(np.asarray(len(unused), np.float32))),
            )
        passes.begin(batch, training=True)  # frees the gradients
        return TensorFlowPending(names, vector, batch.total_weight, unused, weighted)

    def eval_step(self, batch: TensorFlowBatch, partial: PartialSums | None = None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Collective in the replica."""
        if partial is None:
            self._evaluation.begin()
        passes = self._passes
        passes.begin(batch, training=False)
        for place in range(_micro_batches(batch)):
            self._pipeline.evaluate(passes)
            if self._evaluation and self.layout.is_last:
                rows = batch.samples.rows(place, passes.samples(place))
                self._evaluation.add(masks_within(*passes.seen), rows)
        before = 0.0 if partial is None else partial.weight
        sums = tf.zeros([0]) if passes.sums is None else passes.sums
        if partial is not None and passes.sums is not None:
            sums = partial.values + sums
        return PartialSums(self._names, self._weighted, sums, before + batch.total_weight)

    def eval_metrics(self, partial: PartialSums, signals: Sequence[float] = NO_SIGNALS) -> PendingVector:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        self._forms.pop(False, None)
        names, weighted = self._agreed_form(False)
        self._pipeline.messenger.flush()
        own = partial.values if self.layout.is_last else tf.zeros(len(names) + len(weighted))
        vector = tf.concat([own, FINDINGS * [0.0], self._numbers(signals)], 0)
        with peer_errors():
            vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.eval_metrics")
        return self._evaluated(names, vector, partial.weight, weighted)

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the parameters, buffers and optimizer state of the first replica to the others."""
        self.replica_state.restart()
        with peer_errors():
            optimizer = next(iter(self._optimizers.values()))
            self._state.broadcast([optimizer.iterations, *self._scale_variables()])

    def _own_form(self, training: bool) -> Form:
        """Return the names of the sums, as they were when a pass of this kind was traced last."""
        return self._traced_forms.get(training, ((), ()))

    def _make_model(self, task: Any, config: Config, batch: HostBatch | None) -> ModelState:
        """Make this worker's stage of the task's model; return its variables."""
        self._precision = config.precision
        model, blocks, is_whole = self._whole_model(task, config)
        if take_loss(model):
            raise loss_has_parameters()
        self._form = form_of(model)
        whole = ModelState(model, Renaming(task, "tf"))
        owners_of(whole.fields, [blocks])  # each parameter is in one
        seen = batch if is_whole else None
        division = self._division(model, blocks, seen, is_given=gives_blocks(task, "tf"))
        self._firsts = division.firsts(config, self.workers)
        stages = division.of_stages(self._firsts)
        own = stages[self.layout.stage]
        give_memory(own)
        self._shapes = {field.name: field.shape for field in whole.trainable_fields()}
        owners = owners_of(whole.fields, stages)
        self._owners = {field.path: having for field, having in zip(whole.fields, owners, strict=True)}
        parameters = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
        check_one_owner(
            {f.path: self._owners[f.path] for f in whole.fields if id(f.variable) not in parameters}
        )
        self._groups = StageGroups(hvd, self.layout, self.workers.host, stages_that_share(owners))
        self._stage_shapes = shapes_of_stages(whole.fields, owners, self._shapes, config.stages)
        self._stages = describe_stages(self._firsts, len(blocks), self._stage_shapes)
        tensors = whole.part([self.layout.stage in having for having in owners])
        self._layer_state = LayerState(model)
        if self._layer_state:
            raise ConfigError(
                f"stages {config.stages} cannot be used with the layer {self._layer_state.paths[0]}, which "
                "loads its state itself",
                "Compute it in train_data(), or leave out stages.",
                everywhere=True,
            )
        self._precision = precision_of(model, config.precision)
        self._batch_norm, self._batch_norms = BatchNormSync(self._groups.own), len(find_batch_norms(model))
        self._batch_norm.take_over(model, every=config.sync_batch_norm)
        self.model = StageModel(own)
        free_others(whole, own)
        self._seed_states = [v for v in self.model.variables if v.name == "seed_generator_state"]
        self._called = None
        return tensors

    def _whole_model(self, task: Any, config: Config) -> tuple[keras.Model, list[Any], bool]:
        """Return the task's model, its blocks and whether its variables have their values.

        With ``stage_balance`` memory and initial values by name, it is made without memory for variables, if
        these values are known of all parameters.
        """
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
            wrapped = self._wrap(batch)
            arrays = wrapped.arrays
            if len(wrapped.weights.shape) > 1:
                arrays = {name: array[0] for name, array in arrays.items()}
            once, again = (
                call_of(self._train_objective, arrays, self._form, StageModel([])) for _ in range(2)
            )
            check_it_draws_nothing(once, again)
            return once

        def check(call: Call) -> None:
            if is_given:
                self._notes.append(check_blocks(blocks, model, *call))

        return Blocks(blocks, call, check, lambda call: seconds_of(blocks, *call), lambda: bytes_of(blocks))

    def _make_reducer(
        self, trainable: Iterable[Field], config: Config
    ) -> tuple[GradientReducer, LossScale | None]:
        """Make what sums gradients over the replicas, and the scale of the loss if there is one."""
        loss_scale = new_loss_scale(config, self._precision, self.optimizers[0], self._groups.own)
        self._reducer = choose_reducer(config, self._groups.own)
        return self._reducer, loss_scale

    def _make_update(
        self, trainable: list[Field], reducer: GradientReducer, loss_scale: LossScale | None, config: Config
    ) -> None:
        """Make the update of a step of this stage."""
        reducers: dict[tuple[int, ...], Any] = {}
        for stages, group in self._groups.of_shared.items():
            reducers[stages] = choose_reducer(config, group)
            reducers[stages].label = f"shared.{'.'.join(map(str, stages))}."
        shared = {
            field.path: (reducers[tuple(having)], having[0] == self.layout.stage)
            for field in trainable
            if len(having := self._owners[field.path]) > 1
        }
        self._update = StagedUpdate(
            self.layout,
            shared,
            trainable,
            next(iter(self._optimizers.values())),
            reducer,
            self._ema,
            self._clock,
            workers=self._groups.own,
            clip_norm=config.clip_norm,
            loss_scale=loss_scale,
        )

    def _make_state(self, tensors: ModelState) -> TrainingState:
        """Make the state of this worker."""
        return StagedState(
            self.layout,
            self.workers,
            self._pipeline.messenger,
            self._groups,
            self._owners,
            *(tensors, self._optimizers, self._ema),
        )

    def _compile(self, config: Config) -> None:
        """Make the functions that steps call; they are traced when they first are."""
        self._traced_forms = {}
        self._passes = StagePasses(self, self._form)
        self._apply = tf.function(self._trace_update, autograph=False)

    def _trace_update(  # noqa: PLR0917 - tensors, by position as a compiled step is called
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
        update, (names, weighted) = self._update, self._forms[True]
        vector = tf.concat([sums, [unused, 0.0], signals], 0)
        gradients, vector = update.reduce(gradients, vector)
        gradients, vector = update.unscale_or_skip(gradients, vector)
        counted = vector[len(names)] if "loss" in weighted else None
        gradients = update.normalize(gradients, counted, total_weight)
        gradients = update.clip(gradients)
        update.update(gradients, learning_rate)
        update.ema(share)
        return vector

    def _dry_run(
        self, batch: TensorFlowBatch, training: bool, meter: ActivationMeter, draws: list[str]
    ) -> dict[str, NDArray[Any]]:
        """Return loss and metrics of a batch's first micro-batch, by name; the last stage has them."""
        passes = self._passes
        passes.begin(batch, training=training)
        if training:
            others = self._not_of_batch_norms()
            before = [variable.numpy() for variable in others]
            self._pipeline.train(passes, 1)
            meter.take_graph(passes.gradients or ())
            moved = [
                v.path for v, old in zip(others, before, strict=True) if not np.array_equal(v.numpy(), old)
            ]
            if not self.layout.is_last and self._accumulate > 1:
                self._notes.append(_moves(moved, self.layout))
        else:
            self._pipeline.evaluate(passes)
            if self.layout.is_last:
                self._evaluation.try_out(
                    masks_within(*passes.seen) if passes.seen else (),
                    batch.samples.rows(0, passes.samples(0)),
                )
            self._pipeline.messenger.flush()
        if passes.last_values is None:
            return {}
        rows, weights = passes.last_values
        return sample_values(self._names, self._weighted, rows.numpy(), weights.numpy())

    def _not_of_batch_norms(self) -> list[Any]:
        """Return the variables that a forward pass may move, without the statistics of batch norm."""
        norms = find_batch_norms(self.model).values()
        left_out = {id(variable) for layer in norms for variable in layer.variables}
        left_out |= {id(variable) for variable in self.model.trainable_variables}
        left_out |= {id(state) for state in self._seed_states}
        return [variable for variable in self.model.variables if id(variable) not in left_out]


def _moves(paths: Sequence[str], layout: Layout) -> str:
    """Return what follows for a stage before the last from what its forward passes move; empty if nothing."""
    if not paths:
        return ""
    return (
        f"the forward passes of stage {layout.stage + 1} move {', '.join(paths[:3])}"
        f"{' and others' if len(paths) > 3 else ''}; outputs in training that depend on it are computed with "
        f"values up to {layout.stages - layout.stage} micro-batches old, which is not the curve of one worker"
    )


def _micro_batches(batch: TensorFlowBatch) -> int:
    return 1 if len(batch.weights.shape) == 1 else int(batch.weights.shape[0])
