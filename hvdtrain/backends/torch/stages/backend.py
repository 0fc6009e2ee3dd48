"""The PyTorch backend of a worker that has a stage of a split model."""

from collections.abc import Iterable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import sample_values
from hvdtrain.backends.pipeline.checks import (
    describe_stages,
    gives_blocks,
    loss_has_parameters,
    shapes_of_stages,
)
from hvdtrain.backends.pipeline.groups import StageGroups, stages_that_share
from hvdtrain.backends.pipeline.staged import Blocks, Call, Staged
from hvdtrain.backends.pipeline.state import check_one_owner
from hvdtrain.backends.portable.initial_values import has_initial_value
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.records import ModelInfo
from hvdtrain.backends.reduction import GradientReducer, choose_reducer
from hvdtrain.backends.step_metrics import NO_SIGNALS, PartialSums, PendingVector
from hvdtrain.backends.torch import backend
from hvdtrain.backends.torch.activations import apply_activation_checkpointing
from hvdtrain.backends.torch.backend import TorchBackend
from hvdtrain.backends.torch.batches import TorchBatch, TorchPending
from hvdtrain.backends.torch.precision import LossScale, cast_outputs_to_fp32
from hvdtrain.backends.torch.stages.model import (
    StageModel,
    blocks_of,
    bytes_of,
    call_of,
    check_blocks,
    form_of,
    free_others,
    give_memory,
    is_plain,
    owners_of,
    parameters_without_memory,
    seconds_of,
)
from hvdtrain.backends.torch.stages.passes import StageBackend, StagePasses
from hvdtrain.backends.torch.stages.update import StagedState, StagedUpdate
from hvdtrain.backends.torch.state.model_state import Entry, ModelState
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState
from hvdtrain.backends.torch.sync_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends.torch.task_model import LOSS, check_compiler, compiled, make_model
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import TaskError


def start(config: Config, membership: Membership | None = None, ranks: Sequence[int] = ()) -> TorchBackend:
    """Collective. Start Horovod, bind this worker's device and set its threads.

    Raises:
        EnvironmentFault: If the device is missing or the launcher does not fit.
    """
    return backend.start(config, membership, ranks, TorchStagedBackend)


class TorchStagedBackend(Staged, StageBackend):
    """The PyTorch backend of one worker, which has a stage of the model.

    Attributes:
        model: the blocks of this worker's stage, after ``build``.
    """

    _state: StagedState

    def build(self, task: Any, config: Config, batch: HostBatch | None = None) -> ModelInfo:
        """Collective. Build this worker's stage of the model, optimizer and steps, with initial values."""
        self._enter(task, config)
        info = super().build(task, config, batch)
        return self._told(info)

    def eval_step(self, batch: TorchBatch, partial: PartialSums | None = None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Collective in the replica."""
        if partial is None:
            self._evaluation.begin()
        passes = self._passes
        with torch.no_grad():
            passes.begin(batch, training=False)
            for place in range(len(batch.weights)):
                passes.place = place
                self._pipeline.evaluate(passes)
                if self._evaluation and self.layout.is_last:
                    rows = batch.samples.rows(place, passes.samples(place))
                    self._evaluation.add(self._evaluation.take(), rows)
        sums = passes.sums
        before = 0.0 if partial is None else partial.weight
        if partial is not None and sums is not None:
            sums = partial.values + sums
        values = torch.zeros(0) if sums is None else sums
        return PartialSums(self._names, self._weighted, values, before + batch.total_weight)

    def eval_metrics(self, partial: PartialSums, signals: Sequence[float] = NO_SIGNALS) -> PendingVector:
        """Collective. Sum an evaluation over workers, and compute the metrics of the whole of it."""
        self._forms.pop(False, None)
        names, weighted = self._agreed_form(False)
        self._pipeline.messenger.flush()
        own = partial.values if self.layout.is_last else torch.zeros(len(names) + len(weighted))
        vector = torch.cat((own.to(self._device), self._numbers([], signals)))
        with peer_errors():
            hvd.allreduce_(vector, op=hvd.Sum, name="hvdtrain.eval_metrics")
        return self._evaluated(names, vector, partial.weight, weighted)

    def broadcast_state(self, root: int) -> None:
        """Collective. Copy the parameters, buffers and optimizer state of the first replica to the others."""
        self._moving.forget()
        self.replica_state.restart()
        with peer_errors():
            self._state.broadcast(self._optimizer)
            if self._loss_scale is not None:
                found = hvd.broadcast_(self._loss_scale.to_broadcast(), root, "hvdtrain.loss_scale")
                self._loss_scale.follow(found)

    def _make_model(self, task: Any, config: Config, batch: HostBatch | None) -> ModelState:
        """Make this worker's stage of the task's model; return its tensors."""
        model, blocks, is_whole = self._whole_model(task, config)
        if getattr(model, LOSS, model) in (getattr(task, "torch_loss", None), getattr(task, "loss", None)):
            raise loss_has_parameters()
        if config.checkpoint_activations:
            apply_activation_checkpointing(model)
        owners_of(ModelState(model, Renaming(task, "torch")).fields, [blocks])  # each parameter is in one
        seen = batch if is_whole else None
        division = self._division(model, blocks, seen, gives_blocks(task, "torch"))
        self._firsts = division.firsts(config, self.workers)
        stages = division.of_stages(self._firsts)
        own = stages[self.layout.stage]
        give_memory(own, self._device)
        whole = ModelState(model, Renaming(task, "torch"))
        self._shapes = {field.name: field.shape for field in whole.trainable_fields()}
        owners = owners_of(whole.fields, stages)
        self._owners = {
            path: having
            for field, having in zip(whole.fields, owners, strict=True)
            for path in field.tensor_paths
        }
        check_one_owner({e.path: self._owners[e.path] for e in whole.entries if not _is_parameter(e)})
        self._groups = StageGroups(hvd, self.layout, self.workers.host, stages_that_share(owners))
        self._stage_shapes = shapes_of_stages(whole.fields, owners, self._shapes, config.stages)
        self._stages = describe_stages(self._firsts, len(blocks), self._stage_shapes)
        tensors = whole.part([self.layout.stage in having for having in owners])
        free_others(whole, own)
        self._batch_norm, self._batch_norms = BatchNormSync(self._groups.own), len(find_batch_norms(model))
        if config.sync_batch_norm:
            self._batch_norm.take_over(model)
        self.model, self._new_model = self._stage_model(own, model, config), task.torch_model
        self._passes = StagePasses(self, model, loss_may_draw=hasattr(task, "torch_loss"))
        return tensors

    def _whole_model(self, task: Any, config: Config) -> tuple[torch.nn.Module, list[Any], bool]:
        """Return the task's model, its blocks and whether its parameters have their values.

        With ``stage_balance`` memory and initial values by name, it is made without memory for parameters,
        if these values are known of all parameters.
        """
        if config.stage_balance == "memory" and config.initial_parameters == "portable":
            try:
                with parameters_without_memory():
                    model = make_model(task)
                    blocks = blocks_of(task, model)
                fields = ModelState(model, Renaming(task, "torch")).fields
            except (TaskError, NotImplementedError, RuntimeError):  # it uses values of parameters
                fields = []
            drawn = [field for field in fields if any(tensor.is_meta for tensor in field.tensors)]
            if (
                fields
                and all(has_initial_value(field.name, field.shape) for field in drawn)
                and all(is_plain(parameter) for parameter in model.parameters() if parameter.is_meta)
            ):
                return model, blocks, False
            torch.manual_seed(mix(config.seed, 0) >> 1)
        model = make_model(task)
        return model, blocks_of(task, model), True

    def _division(
        self,
        model: torch.nn.Module,
        blocks: Sequence[Any],
        batch: HostBatch | None,
        blocks_are_given: bool,
    ) -> Blocks:
        """Return what divides the blocks of a model, which the task gives or which are its modules."""

        def call() -> Call | None:
            if batch is None:
                return None
            micro_batch = self._wrap(batch).micro_batches[0]
            on_host = {name: tensor.cpu() for name, tensor in micro_batch.items()}
            return call_of(self._train_objective, on_host, form_of(model), model)

        def check(call: Call) -> None:
            if blocks_are_given or type(model).forward is not torch.nn.Sequential.forward:
                self._notes.append(check_blocks(blocks, model, *call))

        return Blocks(blocks, call, check, lambda call: seconds_of(blocks, *call), lambda: bytes_of(blocks))

    def _stage_model(self, own: Sequence[Any], whole: torch.nn.Module, config: Config) -> StageModel:
        """Return the blocks of this worker's stage on its device, changed as the config asks."""
        model = StageModel(own, whole).to(self._device)
        self._precision = config.precision
        if self.layout.is_last:
            cast_outputs_to_fp32(model, config.precision)
        if config.compile:
            check_compiler(self._device, self.workers.host)
            compiled(model)
        return model

    def _make_reducer(
        self, trainable: Iterable[Any], config: Config
    ) -> tuple[GradientReducer, LossScale | None]:
        """Make what sums gradients over the replicas, and the scale of the loss if there is one."""
        loss_scale = LossScale(self._groups.own) if config.precision == "fp16" else None
        self._reducer = choose_reducer(config, self._groups.own)
        return self._reducer, loss_scale

    def _make_update(
        self,
        trainable: list[Entry],
        reducer: GradientReducer,
        loss_scale: LossScale | None,
        config: Config,
        is_own: bool = False,
    ) -> None:
        """Make the update of a step of this stage."""
        self._optimizer = next(iter(self._optimizers.values()))
        reducers = {stages: choose_reducer(config, group) for stages, group in self._groups.of_shared.items()}
        shared = {
            entry.path: (reducers[tuple(having)], having[0] == self.layout.stage)
            for entry in trainable
            if len(having := self._owners[entry.path]) > 1
        }
        self._update = StagedUpdate(
            self.layout,
            shared,
            trainable,
            self._optimizer,
            reducer,
            self._ema,
            self._clock,
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

    def _train_step(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        update, passes = self._update, self._passes
        passes.begin(batch, training=True)
        self._pipeline.train(passes, len(batch.weights))
        unused = update.fill_in_unused()
        names, weighted = self._agreed_form(True)
        sums = (
            passes.sums
            if passes.sums is not None
            else self._no_findings.new_zeros(len(names) + len(weighted))
        )
        vector = update.reduce(torch.cat((sums, self._numbers(unused, signals))))
        if update.unscale_or_skip(vector) and batch.reduced_weight:
            counted = vector[len(names)] if "loss" in weighted else None
            update.normalize(counted, batch.reduced_weight)
            update.clip()
            update.update(learning_rate)
        update.ema(batch.step + 1)
        return TorchPending(names, vector, batch.total_weight, unused, weighted)

    def _dry_run(self, batch: TorchBatch, training: bool) -> dict[str, NDArray[Any]]:
        """Return loss and metrics of a batch's first micro-batch, by name; the last stage has them."""
        self._names = ()  # so that shapes are checked
        passes = self._passes
        passes.begin(batch, training=training)
        if training:
            self._update.begin(reduces=False)
            try:
                self._pipeline.train(passes, 1)
            finally:
                self._update.zero_grad()
                self._update.begin()
        else:
            with torch.no_grad():
                self._pipeline.evaluate(passes)
                if self.layout.is_last:
                    rows = batch.samples.rows(0, passes.samples(0))
                    self._evaluation.try_out(self._evaluation.take(), rows)
            self._pipeline.messenger.flush()
        if passes.last_values is None:
            return {}
        rows_of_values, weights = passes.last_values
        return sample_values(self._names, self._weighted, rows_of_values.cpu().numpy(), weights.cpu().numpy())


def _is_parameter(entry: Entry) -> bool:
    return isinstance(entry.tensor, torch.nn.Parameter)
