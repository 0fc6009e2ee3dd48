"""The step of most jobs: passes over micro-batches, one reduction, one update; as in ``tensorflow/``."""

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import torch
from numpy.typing import NDArray

from hvdtrain.backends.objective.logits import check_foreign
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.step_metrics import PendingVector
from hvdtrain.backends.steps import WholeModelStep
from hvdtrain.backends.torch.batches import TorchBatch, TorchPending
from hvdtrain.backends.torch.computation import Computation
from hvdtrain.backends.torch.objective.metric_objects import COLLECTIVES
from hvdtrain.backends.torch.probes import find_comparing, values_of_first
from hvdtrain.backends.torch.reduction.broadcast import broadcast_model, broadcast_tensors
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState
from hvdtrain.backends.torch.steps.parts import Parts
from hvdtrain.backends.torch.steps.sharded_state import ShardedState
from hvdtrain.backends.torch.steps.update import ShardedGradientsUpdate, ShardedUpdate, Update
from hvdtrain.backends.torch.task_model import foreign_leaf
from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers


class PlainStep(WholeModelStep):
    """The mean gradient over the global batch, summed in one reduction, and an update with it."""

    collectives = COLLECTIVES
    updates = Update, ShardedUpdate, ShardedGradientsUpdate
    states = TrainingState, ShardedState
    comparing = staticmethod(find_comparing)
    computation: Computation
    parts: Parts
    state: TrainingState

    def __init__(self, task: Any, config: Config, workers: Workers, device: torch.device) -> None:
        self.workers = workers
        self.computation = Computation(task, config, workers, device)
        self.near = self.computation.near
        self._synchronizes_batch_norm = config.sync_batch_norm

    @property
    def is_timed(self) -> bool:
        """Whether the clock can tell the time of this worker from that of the others."""
        return not self._synchronizes_batch_norm

    def broadcast(self, root: int) -> None:
        """Collective. Copy the root's tensors to every worker."""
        parts, scale = self.parts, self.parts.loss_scale
        self.state.broadcast_optimizers(self.workers, root)
        broadcast_model(self.computation.model, parts.tensors, self.workers, root)
        self.state.broadcast_ema(root)
        broadcast_tensors(self.to_broadcast(), root, label="local")
        parts.reducer.broadcast(root)
        if scale is not None:
            scale.follow(hvd.broadcast_(scale.to_broadcast(), root, "hvdtrain.loss_scale"))

    def train(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Collective. Do a step."""
        vector, unused = self.run(batch, learning_rate, signals)
        self.update.ema(batch.step + 1)
        return TorchPending(
            self.computation.names,
            vector,
            batch.total_weight,
            unused,
            self.computation.weighted,
            timed=self.parts.clock.timed,
            workers=self.workers.size,
        )

    def gradients(self, batch: TorchBatch) -> torch.Tensor:
        """Add this worker's part of the gradient to the parameters; return the weighted sums of values."""
        sums: torch.Tensor | None = None
        for micro_batch, weights, gradient_weights in self.computation.micro_batches(batch):
            rows = self.add_gradients(micro_batch, weights, gradient_weights)
            sums = torch.mv(rows, weights) if sums is None else sums.addmv_(rows, weights)
        assert sums is not None  # a step has at least one micro-batch
        return sums

    def add_gradients(
        self, micro_batch: dict[str, torch.Tensor], weights: torch.Tensor, gradient_weights: torch.Tensor
    ) -> torch.Tensor:
        """Add a micro-batch's part to the gradients, and return the rows of its values."""
        self.computation.batch_norm.weights = weights
        losses, own, rows = self.computation.per_sample(micro_batch, weights)
        scaled = self.update.scale(gradient_weights)
        self.update.backward(losses, scaled if own is None else scaled * own)
        return rows

    def dry_run(self, batch: TorchBatch, training: bool) -> dict[str, NDArray[Any]]:
        """Return the loss and the metrics of a batch's first micro-batch, by name."""

        def rows_of(micro_batch: Any, weights: torch.Tensor, gradient_weights: torch.Tensor) -> torch.Tensor:
            update, model = self.update, self.computation.model
            update.begin(reduces=False)
            try:
                losses, own, rows = self.computation.per_sample(micro_batch, weights)
                if (leaf := foreign_leaf(losses, model)) is not None:
                    check_foreign(self.parts.task, "torch", leaf, isinstance(leaf, torch.nn.Parameter))
                update.backward(losses, gradient_weights if own is None else gradient_weights * own)
            finally:
                update.zero_grad()
                update.begin()
            return rows

        return values_of_first(self.computation, batch, training, rows_of)

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self.update.begin()
        self.update.zero_grad()

    def run(
        self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]
    ) -> tuple[torch.Tensor, list[str]]:
        """Collective. Do a step; return its vector and the names of the parameters without a gradient."""
        computation, update = self.computation, self.update
        update.zero_grad()
        update.expect(len(batch.weights), batch.in_warmup)
        sums = self.gradients(batch)
        unused = update.fill_in_unused()
        vector = torch.cat((sums, *self.parts.clock.numbers(), computation.numbers(unused, signals)))
        # a worker without samples, as there may be in the last local step, has no gradient
        form = computation.names, computation.weighted
        return update.apply(vector, form, batch.reduced_weight, learning_rate), unused

    def load_layers(self, state: PortableState) -> None:
        """Let layers load what they save themselves."""
        self.parts.tensors.load_extra_states(state)
