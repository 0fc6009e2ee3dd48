"""The step of a worker that has a stage of a split model. ``tensorflow/`` has the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import sample_values
from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.pipeline.checks import (
    gives_blocks,
    loss_has_parameters,
)
from hvdtrain.backends.pipeline.pipeline import Blocks, Call
from hvdtrain.backends.pipeline.stage_step import Form, StageStepBase
from hvdtrain.backends.pipeline.state import check_one_owner
from hvdtrain.backends.portable.initial_values import has_initial_value
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.step_metrics import PendingVector
from hvdtrain.backends.torch.activations import apply_activation_checkpointing
from hvdtrain.backends.torch.batches import TorchBatch, TorchPending
from hvdtrain.backends.torch.computation import Computation
from hvdtrain.backends.torch.objective.evaluation import HorovodCollectives
from hvdtrain.backends.torch.precision import cast_outputs_to_fp32, float_bits_of
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
from hvdtrain.backends.torch.stages.passes import StagePasses
from hvdtrain.backends.torch.state.model_state import Entry, ModelState
from hvdtrain.backends.torch.steps.staged_update import StagedState, StagedUpdate
from hvdtrain.backends.torch.sync_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends.torch.task_model import LOSS, check_compiler, compiled, make_model
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.order import mix
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers


class StageStep(StageStepBase):
    """The part of a step that a worker with a stage of the model does.

    Args:
        task: the task.
        config: the config.
        workers: the job's workers.
        device: where this worker computes.
    """

    collectives, pending, state_kind, hvd = HorovodCollectives, TorchPending, StagedState, hvd
    state: StagedState

    def __init__(self, task: Any, config: Config, workers: Workers, device: torch.device) -> None:
        super().__init__(config, workers)
        self._task, self._config = task, config
        self.computation = Computation(task, config, workers, device)

    def make_model(self, batch: HostBatch | None) -> ModelState:
        """Collective. Make this worker's stage of the task's model; return its tensors."""
        task, config, computation = self._task, self._config, self.computation
        model, blocks, is_whole = self._whole_model()
        if getattr(model, LOSS, model) in (getattr(task, "torch_loss", None), getattr(task, "loss", None)):
            raise loss_has_parameters()
        if config.checkpoint_activations:
            apply_activation_checkpointing(model)
        owners_of(ModelState(model, Renaming(task, "torch")).fields, [blocks])  # each parameter is in one
        seen = batch if is_whole else None
        division = self._division(model, blocks, seen, is_given=gives_blocks(task, "torch"))
        self._firsts = division.firsts(config, self.workers)
        stages = division.of_stages(self._firsts)
        own = stages[self.layout.stage]
        give_memory(own, computation.device)
        whole = ModelState(model, Renaming(task, "torch"))
        owners = owners_of(whole.fields, stages)
        is_own = self.split(
            whole.fields, whole.trainable_fields(), owners, len(blocks), lambda field: field.tensor_paths
        )
        check_one_owner({e.path: self.owners[e.path] for e in whole.entries if not _is_parameter(e)})
        tensors = whole.part(is_own)
        free_others(whole, own)
        computation.batch_norm = BatchNormSync(self.groups.own)
        self._batch_norms = len(find_batch_norms(model))
        if config.sync_batch_norm:
            computation.batch_norm.take_over(model)
        computation.model, self._whole = self._stage_model(own, model), model
        computation.wrap.float_bits = float_bits_of(computation.model)
        return tensors

    def begin_updates(self, shared: Mapping[str, tuple[GradientReducer, bool]]) -> None:
        """Make the update of the stage and its passes."""
        parts = self.parts
        self.update = StagedUpdate(
            self.layout,
            shared,
            parts.trainable,
            parts.optimizers[MAIN],
            parts.reducer,
            parts.ema,
            parts.clock,
            clip_norm=parts.config.clip_norm,
            loss_scale=parts.loss_scale,
        )
        self.passes = StagePasses(self.computation, self.layout, self._whole, self.update)

    def broadcast(self, root: int) -> None:
        """Collective. Copy the tensors of the first replica to the others."""
        scale = self.parts.loss_scale
        self.state.broadcast(self.parts.optimizers[MAIN])
        if scale is not None:
            scale.follow(hvd.broadcast_(scale.to_broadcast(), root, "hvdtrain.loss_scale"))

    def train(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Collective. Do a step."""
        computation, update, passes = self.computation, self.update, self.passes
        update.zero_grad()
        update.expect(len(batch.weights), batch.in_warmup)
        passes.begin(batch, training=True)
        self.pipeline.train(passes, len(batch.weights))
        unused = update.fill_in_unused()
        names, weighted = self.agreed_form(True)
        numbers = computation.numbers(unused, signals)
        sums = passes.sums if passes.sums is not None else numbers.new_zeros(len(names) + len(weighted))
        vector = torch.cat((sums, numbers))
        vector = update.apply(vector, (names, weighted), batch.reduced_weight, learning_rate)
        update.ema(batch.step + 1)
        return TorchPending(names, vector, batch.total_weight, unused, weighted)

    def zeros(self, count: int) -> torch.Tensor:
        """Return a vector of zeros on the CPU."""
        return torch.zeros(count)

    def summed(self, own: torch.Tensor, signals: Sequence[float]) -> torch.Tensor:
        """Collective. Return the vector of an evaluation, summed over workers, of this worker's sums."""
        computation = self.computation
        vector = torch.cat((own.to(computation.device), computation.numbers([], signals)))
        with peer_errors():
            hvd.allreduce_(vector, op=hvd.Sum, name="hvdtrain.eval_metrics")
        return vector

    def dry_run(self, batch: TorchBatch, training: bool) -> dict[str, NDArray[Any]]:
        """Collective. Return loss and metrics of the first micro-batch, by name; the last stage has them."""
        computation, passes = self.computation, self.passes
        computation.names = ()  # so that shapes are checked
        passes.begin(batch, training=training)
        if training:
            self.update.begin(reduces=False)
            try:
                self.pipeline.train(passes, 1)
            finally:
                self.update.zero_grad()
                self.update.begin()
        else:
            self.pipeline.evaluate(passes)
            if self.layout.is_last:
                rows = batch.samples.rows(0, passes.samples(0))
                computation.evaluation.try_out(passes.taken(), rows)
            self.pipeline.messenger.flush()
        if passes.last_values is None:
            return {}
        found, weights = passes.last_values
        return sample_values(
            computation.names, computation.weighted, found.cpu().numpy(), weights.cpu().numpy()
        )

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        super().forget()
        self.update.zero_grad()

    def own_form(self, training: bool) -> Form:
        """Return the names of the sums that the last step or evaluation had, if this is the last stage."""
        return self.computation.names, self.computation.weighted

    def _whole_model(self) -> tuple[torch.nn.Module, list[Any], bool]:
        """Return the task's model, its blocks and whether its parameters have their values.

        With ``stage_balance`` memory and initial values by name, it is made without memory for parameters,
        if these values are known of all parameters.
        """
        task, config = self._task, self._config
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
        self, model: torch.nn.Module, blocks: Sequence[Any], batch: HostBatch | None, is_given: bool
    ) -> Blocks:
        """Return what divides the blocks of a model, which the task gives or which are its modules."""

        def call() -> Call | None:
            if batch is None:
                return None
            micro_batch = self.computation.wrap(batch).micro_batches[0]
            on_host = {name: tensor.cpu() for name, tensor in micro_batch.items()}
            return call_of(self.computation.train_objective, on_host, form_of(model), model)

        def check(call: Call) -> None:
            if is_given or type(model).forward is not torch.nn.Sequential.forward:
                self.notes.append(check_blocks(blocks, model, *call))

        return Blocks(blocks, call, check, lambda call: seconds_of(blocks, *call), lambda: bytes_of(blocks))

    def _stage_model(self, own: Sequence[Any], whole: torch.nn.Module) -> StageModel:
        """Return the blocks of this worker's stage on its device, changed as the config requests."""
        config, device = self._config, self.computation.device
        model = StageModel(own, whole).to(device)
        if self.layout.is_last:
            cast_outputs_to_fp32(model, config.precision)
        if config.compile:
            check_compiler(device, self.workers.host)
            compiled(model)
        return model


def _is_parameter(entry: Entry) -> bool:
    return isinstance(entry.tensor, torch.nn.Parameter)
