"""What every step computes of a batch: model, loss and metrics, seeds, modes and the sums of its samples."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from hvdtrain.backends.objective.losses import Values, Weighted, check_values
from hvdtrain.backends.objective.objective import ComputationBase
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.step_metrics import NO_SIGNALS, NUMBERS_AFTER_SUMS, PartialSums, findings
from hvdtrain.backends.torch import task_model
from hvdtrain.backends.torch.batches import BatchMaker, Counted, TorchBatch
from hvdtrain.backends.torch.export import TENSORS
from hvdtrain.backends.torch.objective.gathering import Gathering
from hvdtrain.backends.torch.objective.losses import FUNCTIONS, weigh
from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.torch.state.tensors import as_array
from hvdtrain.backends.torch.sync_batch_norm import BatchNormSync, find_batch_norms
from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.data.order import mix
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.seeding import seed_host_step


class Computation(ComputationBase):
    """What the steps of a job compute of a batch on this worker."""

    model: torch.nn.Module
    batch_norm: BatchNormSync

    def __init__(self, task: Any, config: Config, workers: Workers, device: torch.device) -> None:
        super().__init__(task, config, workers, FUNCTIONS, torch.Tensor.to)
        self.device = device
        is_local = config.sync_every is not None
        self.near: Workers = Workers(workers.host) if is_local else workers
        self.wrap = BatchMaker(device, is_local)
        self.gathering = Gathering(workers.most)
        self.new_model, self.precision = task.torch_model, config.precision
        self._has_batch_norm = False
        # what the model's flag was when train() or eval() was called last; None before that
        self.is_training, self._flag = False, cast(bool | None, None)
        self._no_findings = torch.zeros(NUMBERS_AFTER_SUMS, device=device)

    def make_model(self) -> ModelState:
        """Make the task's model on its device, changed as the config says; return this worker's tensors."""
        config = self.config
        model = task_model.make_model(self.task).to(self.device)
        self.batch_norm, self._has_batch_norm = BatchNormSync(self._workers), bool(find_batch_norms(model))
        if config.sync_batch_norm:
            self.batch_norm.take_over(model)
        task_model.cast_outputs_to_fp32(model, config.precision)
        if config.checkpoint_activations:
            task_model.apply_activation_checkpointing(model)
        if config.compile:
            task_model.check_compiler(self.device, self._workers.host)
            model = task_model.compiled(model)
        self.model = model
        tensors = ModelState(model, Renaming(self.task, "torch"))
        self.wrap.float_bits = task_model.float_bits_of(model)
        return tensors

    def begin_step(self, step: int) -> None:
        """Seed what a step draws, and put the model into training. Local: no collective."""
        self.seed_step(step)
        self.enter_mode(training=True)

    def seed_step(self, step: int, *place: int) -> None:
        """Seed the generators of PyTorch, numpy and Python for a step, or for one of its micro-batches."""
        seed = mix(self.config.seed, step, self._workers.rank, *place) >> 1
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)
        torch.default_generator.manual_seed(seed)
        seed_host_step(seed)

    def enter_mode(self, training: bool) -> None:
        """Call ``train()`` or ``eval()`` of the model, unless it was the last of both that was called."""
        if self.is_training is not training or self.model.training is not self._flag:
            (self.model.train if training else self.model.eval)()
            self.is_training, self._flag = training, self.model.training

    def forget_mode(self) -> None:
        """Let the next step call ``train()`` or ``eval()``: somebody else has changed the modes."""
        self._flag = None

    def numbers(self, unused: Sequence[str], signals: Sequence[float]) -> torch.Tensor:
        """Return what stands after the sums in a vector that is reduced: findings and signals."""
        if not unused and signals is NO_SIGNALS:
            return self._no_findings
        return self._no_findings.new_tensor((*findings(float(len(unused))), *signals))

    def micro_batches(self, batch: TorchBatch) -> Iterator[Counted]:
        """Yield micro-batches with their weights; the task's functions are given no padding."""
        # batch norm trains with no single row, and other workers may have more: such a row is repeated
        least = 2 if self.is_training and self._has_batch_norm else 1
        for place in range(len(batch.weights)):
            if self.is_own_loss:
                yield batch.counted(place, least)
            else:
                yield batch.micro_batches[place], batch.weights[place], batch.gradient_weights[place]

    def per_sample(self, micro_batch: dict[str, torch.Tensor], weights: torch.Tensor) -> Values[torch.Tensor]:
        """Collective if the objective gathers. Return losses and all values of a micro-batch's samples."""
        return self.values(self.given(micro_batch, weights), len(weights))

    def given(self, micro_batch: dict[str, torch.Tensor], weights: torch.Tensor) -> dict[str, Any]:
        """Collective if the objective gathers. Return what it gives: the loss, the first, and the metrics."""
        training = self.is_training
        objective = self.train_objective if training else self.eval_objective
        among = self.gathering.among(self.near if training else self._workers, weights)
        with task_model.autocast(self.precision, self.device), among:
            losses, metrics = objective(self.model, micro_batch)
        return {"loss": losses, **metrics}

    def values(self, given: dict[str, Any], samples: int) -> Values[torch.Tensor]:
        """Return the loss, the first, and the metrics of the samples of a micro-batch."""
        weighted = tuple([name for name, value in given.items() if isinstance(value, Weighted)])
        names = tuple(given)
        if names != self.names or weighted != self.weighted:
            check_values(given, samples)
            self.names, self.weighted = names, weighted
        return weigh(given, samples, torch.float64 if self.wrap.float_bits == 64 else torch.float32)

    def evaluate(self, batch: TorchBatch, partial: PartialSums | None) -> PartialSums:
        """Evaluate one batch and return the sums so far. Local unless the loss gathers."""
        self.enter_mode(training=False)
        if partial is None:
            self.evaluation.begin()
        # and no inference mode, whose tensors neither a step nor Horovod can use later
        with torch.no_grad(), peer_errors():
            for place, (micro_batch, weights, _) in enumerate(self.micro_batches(batch)):
                sums = torch.mv(self.per_sample(micro_batch, weights).rows, weights)
                before = 0.0 if partial is None else partial.weight
                sums = sums if partial is None else partial.values + sums
                partial = PartialSums(self.names, self.weighted, sums, before + batch.total_weight)
                if self.evaluation:
                    self.evaluation.add(self.evaluation.take(), batch.samples.rows(place, len(weights)))
        assert partial is not None  # a batch has at least one micro-batch
        return partial

    def summed(self, values: torch.Tensor, signals: Sequence[float]) -> torch.Tensor:
        """Collective. Return the vector of an evaluation, summed over workers, of this worker's sums."""
        vector = torch.cat((values, self.numbers([], signals)))
        if self._workers.size > 1:
            with peer_errors():
                hvd.allreduce_(vector, op=hvd.Sum, name="hvdtrain.eval_metrics")
        return vector

    def predict(self, batch: TorchBatch) -> dict[str, NDArray[Any]]:
        """Return the model's outputs for one batch, by name. Local: no collective."""
        self.enter_mode(training=False)
        found: dict[str, list[NDArray[Any]]] = {}
        with torch.no_grad(), task_model.autocast(self.precision, self.device), self.gathering.alone():
            for micro_batch in batch.micro_batches:
                outputs = self.serving.predicted(self.model, micro_batch, TENSORS)
                for name, tensor in outputs.items():
                    found.setdefault(name, []).append(as_array(tensor))
        return {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in found.items()}

    def _watch(self, outputs: Any, batch: Any) -> None:
        """Keep outputs for the metrics, without the gradient that a model may compute in evaluation, too."""
        super()._watch(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), batch)
