"""The optimizers that a task's own step is given in PyTorch; as in ``tensorflow/steps/step_optimizer.py``."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.custom_step import (
    CallsBase,
    StepOptimizerBase,
    StepPart,
    check_gradients,
    check_reached,
    stepped_alone,
)
from hvdtrain.backends.reduction import GradientReducer, choose_reducer
from hvdtrain.backends.torch.objective.losses import check_values, weigh
from hvdtrain.backends.torch.reduction.all_reduce import zeros_for
from hvdtrain.backends.torch.state.model_state import Entry
from hvdtrain.backends.torch.state.tensors import as_kept, set_values, try_step
from hvdtrain.config import Config
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers


class Calls(CallsBase[Callable[[], None]]):
    """The calls of a step; what they return waits for a check, and raises its error."""

    def __init__(self, names: Sequence[str], workers: Workers) -> None:
        super().__init__(names)
        self._workers = workers

    def _compare(
        self, name: str, number: int, codes: list[float], different_form: TaskError
    ) -> Callable[[], None]:
        if self._workers.size == 1:
            return lambda: None
        own = torch.tensor(codes, dtype=torch.float64)
        handle = hvd.allreduce_async(own, op=hvd.Sum, name=f"hvdtrain.own_step.{number}")

        def check() -> None:
            is_equal = torch.eq(hvd.synchronize(handle), own * self._workers.size).tolist()
            if not all(is_equal[:2]):
                raise self._different_call(name, number)
            if not all(is_equal):
                raise different_form

        return check


class StepOptimizer(StepOptimizerBase):
    """One of the optimizers that a task's own step is given."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        entries: Sequence[Entry],
        config: Config,
        calls: Calls,
        *,
        workers: Workers,
    ) -> None:
        super().__init__(name, config, calls)
        self._optimizer = optimizer
        self._paths = [entry.path for entry in entries]
        self._parameters = [entry.tensor for entry in entries]
        self._workers = workers
        self._new_reducer = partial(choose_reducer, config, workers)
        self._reducers: list[GradientReducer] = []  # one for each call of a step, so that names differ
        self._is_stepping = False
        optimizer.register_step_pre_hook(self._check_step)

    @property
    def variables(self) -> list[torch.Tensor]:
        """The parameters that it trains, in the order of the gradients."""
        return list(self._parameters)

    @property
    def learning_rate(self) -> float:
        """The learning rate of this step; the largest one if its parameter groups have several."""
        groups, rate = self._optimizer.param_groups, self._of_step().learning_rate
        if rate is None:
            return max(float(group["lr"]) for group in groups)
        return float(rate * max(group.get("lr_scale", 1.0) for group in groups))

    def gradients(self, losses: Any, retain_graph: bool = False) -> list[torch.Tensor]:
        """Collective. Return the mean gradient over the global batch, one tensor for each variable."""
        samples = self._of_step()
        given = {f"what is given to the optimizer {self._name!r}": losses}
        check_values(given, len(samples.weights))
        values = weigh(given, len(samples.weights), samples.weights.dtype)
        check_reached(self._name, values.losses.requires_grad)
        weights = samples.gradient_weights
        with torch.autocast(weights.device.type, enabled=False):
            found = torch.autograd.grad(
                values.losses,
                self._parameters,
                weights if values.loss_weights is None else weights * values.loss_weights,
                retain_graph=retain_graph,
                allow_unused=True,
            )
            self._note_unused(found)
            counted = None if values.loss_weights is None else torch.mv(values.rows, samples.weights)[1:]
            return self._reduced(found, counted, samples)

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """Clip the gradients, set the learning rate and take a step."""
        samples = self._of_step()
        found = [tuple(g.shape) if isinstance(g, torch.Tensor) else None for g in gradients]
        check_gradients(self._name, found, [tuple(p.shape) for p in self._parameters])
        self.is_applied = True
        is_dry = samples.learning_rate is None
        if is_dry and self._optimizer.state:
            return
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            # clipping would change the tensors of the task
            parameter.grad = gradient.detach() if self._clip_norm is None else gradient.detach().clone()
        self._is_stepping = True
        try:
            with torch.autocast(samples.weights.device.type, enabled=False):
                if is_dry:
                    named = dict(zip(self._paths, self._parameters, strict=True))
                    before = [as_kept(parameter) for parameter in self._parameters]
                    try_step(self._optimizer, named, self._clip_norm)
                    for parameter, values in zip(self._parameters, before, strict=True):
                        set_values(parameter, values)
                    return
                if self._clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
                for group in self._optimizer.param_groups:
                    group["lr"] = samples.learning_rate * group.get("lr_scale", 1.0)
                self._optimizer.step()
        finally:
            self._is_stepping = False
            for parameter in self._parameters:
                parameter.grad = None

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self._samples = None
        for reducer in self._reducers:
            reducer.attach({})  # takes its hooks off
        self._reducers.clear()

    def _note_unused(self, found: Sequence[torch.Tensor | None]) -> None:
        missed = {path for path, gradient in zip(self._paths, found, strict=True) if gradient is None}
        check_reached(self._name, len(missed) < len(self._paths))
        self.unused = missed if self._own_calls == 0 else self.unused & missed

    def _reduced(
        self, found: Sequence[torch.Tensor | None], counted: torch.Tensor | None, samples: StepPart
    ) -> list[torch.Tensor]:
        """Collective. Return the sums of gradients over workers, divided by the share that counted."""
        pairs = list(zip(found, self._parameters, strict=True))
        call, self._own_calls = self._own_calls, self._own_calls + 1
        if self._workers.size > 1 and samples.learning_rate is not None:
            check = self._calls.announce(self._name, is_weighted=counted is not None)
            reducer = self._reducer(call)
            if reducer.overwrites:
                gradients = [self._owned(gradient, parameter) for gradient, parameter in pairs]
            else:
                gradients = [zeros_for(self._optimizer, p) if g is None else g for g, p in pairs]
            reducer.start(gradients)  # the check then waits for no round of its own
            check()
            handle = None
            if counted is not None:  # on all workers, as the check has found
                name = f"hvdtrain.counted.{self._name}.{call}"
                handle = hvd.allreduce_async_(counted, op=hvd.Sum, name=name)
            try:
                gradients, _ = reducer.finish(gradients)
            finally:
                if handle is not None:
                    hvd.synchronize(handle)
        else:
            gradients = [self._owned(gradient, parameter) for gradient, parameter in pairs]
        if counted is None:
            return gradients
        factor = torch.where(counted > 0, samples.total_weight / counted, 1.0)
        return [gradient * factor.squeeze(0) for gradient in gradients]  # some may be sparse

    def _owned(self, gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
        """Return a gradient in memory of its own, laid out as its parameter; zeros if it was not reached."""
        if gradient is None:
            return zeros_for(self._optimizer, parameter)
        if gradient.is_sparse:
            return gradient.clone()
        return torch.empty_like(parameter).copy_(gradient)

    def _reducer(self, call: int) -> GradientReducer:
        if call == len(self._reducers):
            reducer = self._new_reducer()
            names = [f"{self._name}.{call}.{path}" for path in self._paths]
            reducer.attach(dict(zip(names, self._parameters, strict=True)))
            self._reducers.append(reducer)
        return self._reducers[call]

    def _check_step(self, *_: Any) -> None:
        """Refuse a step that the task's own step takes by itself; a hook of the optimizer."""
        if self._samples is not None and not self._is_stepping:
            raise stepped_alone(self._name)
