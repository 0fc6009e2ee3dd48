"""The step of a worker that has a stage of a split model. ``tensorflow/`` has the same."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from numpy.typing import NDArray
from torch import nn

from hvdtrain.backends.pipeline.checks import blocks_of
from hvdtrain.backends.pipeline.stage_step import StageStepBase, StateOfStage
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.torch.batches import TorchBatch
from hvdtrain.backends.torch.reduction.all_reduce import summed_meanwhile
from hvdtrain.backends.torch.reduction.broadcast import broadcast_tensors
from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.torch.steps import stage_passes
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState
from hvdtrain.backends.torch.steps.plain_step import Parts, PlainStep
from hvdtrain.backends.torch.steps.update import Update, scale_to_norm
from hvdtrain.backends.torch.sync_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends.torch.task_model import (
    LOSS,
    apply_activation_checkpointing,
    cast_outputs_to_fp32,
    check_compiler,
    compiled,
    float_bits_of,
    make_model,
)
from hvdtrain.data.feed import HostBatch
from hvdtrain.workers.agreement import WorkerPlace


class StagedState(StateOfStage, TrainingState):
    """Model and optimizer of one stage as a part of a portable state; the arguments are its bases'."""

    def replicated(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return all tensors that replicas have, with the path of the model's tensor that they belong to."""
        averages = dict(zip(self.ema.paths, self.ema.to_broadcast(), strict=True))
        for entry in self.model.entries:
            slots = sorted(self._parts[0].optimizer.state.get(entry.tensor, {}).items())
            average = averages.get(entry.path)
            for tensor in (entry.tensor.detach(), *(value for _, value in slots), average):
                if isinstance(tensor, torch.Tensor):
                    yield entry.path, tensor

    copy = staticmethod(broadcast_tensors)


class StagedUpdate(Update):
    """The update of a step of a split model: this worker updates the parameters of its stage."""

    def __init__(self, parts: Parts, layout: WorkerPlace, counted_elsewhere: Collection[str]) -> None:
        self._layout, self._counted_elsewhere = layout, counted_elsewhere
        super().__init__(parts)

    def clip(self, clip_norm: float) -> torch.Tensor:
        """Collective. Scale the gradients of all stages to a norm of at most that; return what it was."""
        squares = torch.zeros((), dtype=torch.float64)
        for entry in self._entries:
            if entry.tensor.grad is not None and entry.path not in self._counted_elsewhere:
                squares += entry.tensor.grad.to(torch.float64).square().sum().cpu()
        # every replica adds the same
        total = hvd.allreduce(squares, op=hvd.Sum, name="hvdtrain.gradient_norm") / self._layout.replicas
        norm: torch.Tensor = total.sqrt()
        if gradients := self._gradients():
            scale_to_norm(gradients, norm, clip_norm)
        return norm

    def _with_reached(self, vector: torch.Tensor) -> torch.Tensor:
        return vector  # which has the same numbers in all stages

    def _without_reached(self, vector: torch.Tensor) -> torch.Tensor:
        return vector


class StageStep(StageStepBase, PlainStep):
    """The part of a step that a worker with a stage of the model does; the arguments are ``PlainStep``'s."""

    framework = "torch"
    on_host = staticmethod(lambda tensor: tensor.cpu().numpy())
    module, parts_of_stage = stage_passes, (StagedState, StagedUpdate)
    state: StagedState

    @staticmethod
    def finish_with(finish: Callable[[], list[torch.Tensor]], vector: Any) -> tuple[list[torch.Tensor], Any]:
        """Collective. Sum a vector over all workers while another function runs; return what that does."""
        with summed_meanwhile(vector):
            return finish(), vector

    def make_model(self, batch: HostBatch | None) -> Any:
        """Collective. Make this worker's stage of the task's model; return its tensors."""
        task, config, computation = self._task, self._config, self.computation
        model = self._whole = make_model(task)
        of_sequential = list(model) if isinstance(model, nn.Sequential) else None
        losses = getattr(task, "torch_loss", None), getattr(task, "loss", None)
        blocks = blocks_of(task, model, "torch", of_sequential, getattr(model, LOSS, model) in losses)
        if config.checkpoint_activations:
            apply_activation_checkpointing(model)
        whole = ModelState(model, Renaming(task, "torch"))
        own, tensors = self.divide(model, blocks, whole, batch, set(map(id, model.parameters())))
        stage_passes.free_others(whole, own)
        computation.batch_norm = BatchNormSync(self.near)
        self.batch_norms = len(find_batch_norms(model))
        if config.sync_batch_norm:
            computation.batch_norm.take_over(model)
        computation.model = stage_passes.StageModel(own, model).to(computation.device)
        if self.layout.is_last_stage:
            cast_outputs_to_fp32(computation.model, config.precision)
        if config.compile:
            check_compiler(computation.device, self.workers.host)
            compiled(computation.model)
        computation.wrap.float_bits = float_bits_of(computation.model)
        return tensors

    def first_of(self, batch: HostBatch) -> dict[str, torch.Tensor]:
        """Return the first micro-batch of a batch, on the host."""
        return {name: tensor.cpu() for name, tensor in self.computation.wrap(batch).micro_batches[0].items()}

    def trace(self) -> None:
        """Make the passes anew."""
        self.passes = stage_passes.StagePasses(self, self._whole)

    def broadcast(self, root: int) -> None:
        """Collective. Copy the tensors of the first replica to the others."""
        self.state.broadcast()

    def gradients(self, batch: TorchBatch) -> Any:
        """Collective. Add to the gradients of the stage; return the weighted sums, zeros before the last."""
        self.passes.begin(batch, training=True)
        self.passes.train(len(batch.weights))
        form = self.computation.names, self.computation.weighted = self.agreed_form(True)
        return self.own_sums(self.passes.sums, form)

    def zeros(self, count: int) -> torch.Tensor:
        """Return so many zeros on the device."""
        return torch.zeros(count, device=self.computation.device)

    def dry_run(
        self, batch: TorchBatch, training: bool, draws: Sequence[str] = ()
    ) -> dict[str, NDArray[Any]]:
        """Collective. Return loss and metrics of the first micro-batch, by name; the last stage has them."""
        self.computation.names = ()  # so that shapes are checked
        self.update.begin(reduces=False)
        try:
            return super().dry_run(batch, training)
        finally:
            self.forget()
