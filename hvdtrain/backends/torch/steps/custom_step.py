"""A task's own training step; ``tensorflow/`` has the same, and ``backends/custom_step.py`` the rules."""

from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as hvd
import torch
from numpy.typing import NDArray

from hvdtrain.backends.custom_step import CallsBase, CustomStepRules, StepOptimizerBase, StepPart
from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.torch.batches import TorchBatch
from hvdtrain.backends.torch.probes import values_of_first
from hvdtrain.backends.torch.steps.plain_step import Parts, PlainStep
from hvdtrain.backends.torch.steps.update import fitting_gradient
from hvdtrain.backends.torch.task_model import autocast
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers


class Calls(CallsBase):
    """The calls of a step; what they return waits for a check, and raises its error."""

    def _compare(self, codes: list[float], different: TaskError) -> Callable[[], None]:
        if self._workers.size == 1:
            return lambda: None
        own = torch.tensor(codes, dtype=torch.float64)
        handle = hvd.allreduce_async(own, op=hvd.Sum, name=f"hvdtrain.own_step.{self.number}")

        def check() -> None:
            if not torch.equal(hvd.synchronize(handle), own * self._workers.size):
                raise different

        return check


class StepOptimizer(StepOptimizerBase):
    """One of the optimizers that a task's own step is given."""

    def __init__(self, name: str, parts: Parts, calls: Calls, workers: Workers) -> None:
        super().__init__(name, parts.config, calls, workers)
        self._optimizer = parts.optimizers[name]
        own = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        entries = [entry for entry in parts.trainable if id(entry.tensor) in own]
        self._paths = [entry.path for entry in entries]
        # the parameters that it trains, in the order of the gradients
        self.variables: list[torch.Tensor] = [entry.tensor for entry in entries]
        self._reducers: list[GradientReducer] = []  # one for each call of a step, so that names differ
        self._optimizer.register_step_pre_hook(self._check_step)

    @property
    def learning_rate(self) -> float:
        """The learning rate of this step; the largest one if its parameter groups have several."""
        groups, rate = self._optimizer.param_groups, self._of_step().learning_rate
        if rate is None:
            return max(float(group["lr"]) for group in groups)
        return float(rate * max(group.get("lr_scale", 1.0) for group in groups))

    def gradients(self, losses: Any, retain_graph: bool = False) -> list[torch.Tensor]:
        """Collective. Return the mean gradient over the global batch, one tensor for each variable."""
        samples, wanted = self._of_step(), self.variables
        weights = samples.gradient_weights
        self._check_losses(losses, len(weights))
        with torch.autocast(weights.device.type, enabled=False):
            losses = losses.to(weights.dtype)
            found: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if losses.requires_grad:
                options = {"retain_graph": retain_graph, "allow_unused": True}
                found = torch.autograd.grad(losses, wanted, weights, **options)
            self._note_unused(self._paths, found)
            return self._reduced(found, is_dry=samples.learning_rate is None)

    def _apply(self, gradients: Sequence[torch.Tensor], samples: StepPart) -> None:
        for parameter, gradient in zip(self.variables, gradients, strict=True):
            # clipping would change the tensors of the task
            parameter.grad = gradient.detach() if self._clip_norm is None else gradient.detach().clone()
        try:
            with torch.autocast(samples.weights.device.type, enabled=False):
                if self._clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(self.variables, self._clip_norm)
                for group in self._optimizer.param_groups:
                    group["lr"] = samples.learning_rate * group.get("lr_scale", 1.0)
                self._optimizer.step()
        finally:
            for parameter in self.variables:
                parameter.grad = None

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        for reducer in self._reducers:
            reducer.attach({})  # takes its hooks off
        self._reducers.clear()

    def _reduced(self, found: Sequence[torch.Tensor | None], is_dry: bool) -> list[torch.Tensor]:
        """Collective. Return the sums of gradients over workers."""
        pairs = list(zip(found, self.variables, strict=True))
        if self._workers.size == 1 or is_dry:
            return [self._owned(gradient, parameter) for gradient, parameter in pairs]
        check = self._calls.announce(f"gradients() of {self._name!r}")
        if (call := self._own_calls - 1) == len(self._reducers):
            self._reducers.append(self._new_reducer())
            names = [f"{self._name}.{call}.{path}" for path in self._paths]
            self._reducers[call].attach(dict(zip(names, self.variables, strict=True)))
        reducer = self._reducers[call]
        if reducer.overwrites:
            gradients = [self._owned(gradient, parameter) for gradient, parameter in pairs]
        else:
            gradients = [fitting_gradient(self._optimizer, p, g) for g, p in pairs]
        reducer.start(gradients)  # the check then waits for no round of its own
        check()
        return reducer.finish(gradients)[0]

    def _owned(self, gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
        """Return a gradient in memory of its own, laid out as its parameter; zeros if it was not reached."""
        found = fitting_gradient(self._optimizer, parameter, gradient)
        if found is not gradient:
            return found
        if found.is_sparse:
            return found.clone()
        return torch.empty_like(parameter).copy_(found)


class CustomStep(CustomStepRules, PlainStep):
    """A task's own training step: it calls the model and its optimizers as it likes."""

    kinds = Calls, StepOptimizer

    def attach(self, parts: Parts) -> None:
        super().attach(parts)
        for entry in parts.trainable:  # before the hooks of reducers
            entry.tensor.register_post_accumulate_grad_hook(self._refuse)

    def changed_early(self) -> list[Any]:
        """Return the optimizers whose updates a step does before its last reduction."""
        return list(self.parts.optimizers.values())

    def run(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> Any:
        computation = self.computation
        micro_batch, weights, gradient_weights = batch.counted(0)
        samples = StepPart(weights, gradient_weights, learning_rate)
        rows = self._rows(micro_batch, batch.step, samples)
        unused = [f"model/{path}" for one in self._optimizers.values() for path in sorted(one.unused)]
        vector = torch.cat((torch.mv(rows, weights), computation.numbers(unused, signals)))
        if self.workers.size > 1:
            check = self._calls.announce_end(computation.names, computation.weighted)
            handle = hvd.allreduce_async_(vector, op=hvd.Sum, name="hvdtrain.metrics")
            check()
            hvd.synchronize(handle)
        self.parts.ema.update(self.parts.ema.share(batch.step + 1))
        self.parts.trained_set.look()
        return vector, (computation.names, computation.weighted, unused)

    def dry_run(self, batch: TorchBatch, training: bool) -> dict[str, NDArray[Any]]:
        """Collective. Return the loss and the metrics of a batch's first micro-batch, by name."""

        def rows_of(micro_batch: Any, weights: torch.Tensor, gradient_weights: torch.Tensor) -> torch.Tensor:
            samples = StepPart(weights, gradient_weights, None)
            return self._rows(micro_batch, batch.step, samples)

        return values_of_first(self.computation, batch, training, rows_of)

    def forget(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.forget()

    def _rows(self, micro_batch: dict[str, torch.Tensor], number: int, samples: StepPart) -> torch.Tensor:
        """Collective. Do the task's step, or a dry run of it, and return the rows of its values."""
        computation = self.computation
        computation.batch_norm.weights = samples.weights
        # a cached cast of a weight would not follow the weight when it is updated within the step
        among = computation.gathering.among(self.near, samples.weights)
        with (
            autocast(computation.precision, computation.device, cache=False),
            among,
            self._running(number, samples) as optimizers,
        ):
            losses, metrics = self._step(computation.model, micro_batch, optimizers)
        return computation.values({"loss": losses, **metrics}, len(samples.weights)).rows

    def _refuse(self, parameter: torch.Tensor) -> None:
        """Refuse gradients that a backward pass of the task's own has added to a parameter; a hook."""
        if self._is_running:
            parameter.grad = None
            raise TaskError(
                "the task's own step called backward(), whose gradients are those of this worker alone",
                "Call minimize(losses) or gradients(losses) of an optimizer, with one loss per sample. For "
                "gradients of inputs, use torch.autograd.grad(losses.sum(), inputs).",
            )
