"""A task's own training step in PyTorch: the optimizers that it is given, and how it is run.

``tensorflow/own_step.py`` does the same for Keras; the rules are in ``backends/own_step.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch

from hvdtrain.backends.base import OwnRates
from hvdtrain.backends.named_optimizers import (
    check_named_optimizers,
    check_owners,
    combined_rates,
    in_one_array,
)
from hvdtrain.backends.own_step import (
    NotCalled,
    Optimizers,
    Step,
    accumulated,
    check_gradients,
    check_losses,
    check_reached,
    check_takes_no_closure,
    different_calls,
    different_metrics,
    different_weighting,
    metrics_code,
    outside_of_step,
    stepped_alone,
)
from hvdtrain.backends.torch.ema import ExponentialMovingAverage
from hvdtrain.backends.torch.model_state import Entry, ModelState
from hvdtrain.backends.torch.optimizers import take_own_rates
from hvdtrain.backends.torch.reduction import AllReduce, GradientReducer, choose_reducer
from hvdtrain.backends.torch.weighting import check_values, weigh
from hvdtrain.config import Config
from hvdtrain.errors import TaskError


class StepPart(NamedTuple):
    """The samples of a step on one worker, and what an update with them needs.

    Attributes:
        weights: (samples,).
        gradient_weights: (samples,): each sample's part in the mean gradient over the global batch.
        total_weight: sum of the samples' weights over all workers.
        learning_rate: that of the step; None in a dry run, which neither reduces nor updates anything.
    """

    weights: torch.Tensor
    gradient_weights: torch.Tensor
    total_weight: float
    learning_rate: float | None


def make_optimizers(
    task: Any, model: torch.nn.Module, tensors: ModelState
) -> dict[str, torch.optim.Optimizer]:
    """Make the optimizers of a task that names several.

    Args:
        task: the task, which has ``torch_optimizers``.
        model: the model.
        tensors: the model's tensors.

    Raises:
        TaskError: If it gives something else, or not exactly one of them trains each trainable parameter.
    """
    method = "torch_optimizers"
    by_name = check_named_optimizers(task.torch_optimizers(model), torch.optim.Optimizer, method)
    known = {id(entry.tensor) for entry in tensors.entries}
    names = {id(entry.tensor): entry.path for entry in tensors.entries if entry.trainable}
    owned: dict[str, list[str]] = {}
    foreign: dict[str, int] = {}
    owners: dict[int, str] = {}
    for name, optimizer in by_name.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        owned[name] = [names[id(p)] for p in parameters if id(p) in names]
        foreign[name] = sum(id(p) not in known for p in parameters)
        owners |= dict.fromkeys(map(id, parameters), name)
    check_owners(method, list(names.values()), owned, foreign)
    for field in tensors.trainable_fields():
        if len({owners.get(id(tensor)) for tensor in field.tensors}) > 1:
            raise in_one_array(field.name)
    return by_name


def take_rates(optimizers: Mapping[str, torch.optim.Optimizer]) -> OwnRates:
    """Take the learning rates of a task's optimizers as their own; the largest of all is the base.

    Raises:
        TaskError: as ``take_own_rates``.
    """
    rates, relative = combined_rates({name: take_own_rates(one) for name, one in optimizers.items()})
    for name, optimizer in optimizers.items():
        if relative[name] != 1.0:
            for group in optimizer.param_groups:
                group["lr_scale"] = group.get("lr_scale", 1.0) * relative[name]
    return rates


class Calls:
    """Checks that all workers make the same calls in a step, with an all-reduce of four numbers for each.

    If they did not, each would wait for sums that others do not compute.

    Args:
        names: the optimizers.
        size: number of workers.
    """

    def __init__(self, names: Sequence[str], size: int) -> None:
        self._codes = {"": 0.0} | {name: 1.0 + place for place, name in enumerate(names)}
        self._size = size
        self._number = 0

    def begin(self) -> None:
        """Begin a step. Local: no collective."""
        self._number = 0

    def announce(self, name: str, is_weighted: bool) -> Callable[[], None]:
        """Collective. Begin the check of a call, and return what waits for it.

        Args:
            name: the optimizer whose gradients are about to be reduced.
            is_weighted: whether its losses have weights of their own, which are then summed as well.

        Raises:
            TaskError: when waiting, on all workers, if their calls differ.
        """
        return self._announce(name, float(is_weighted), different_weighting(name, self._number))

    def announce_end(self, names: Sequence[str], weighted: Sequence[str]) -> Callable[[], None]:
        """Collective. Begin the check of the end of a step, and return what waits for it.

        Args:
            names: "loss" and the metrics that the step returned, which are summed by position.
            weighted: those of them that are Weighted.

        Raises:
            TaskError: when waiting, on all workers, if another made a call or returned other metrics.
        """
        return self._announce("", metrics_code(names, weighted), different_metrics(names, weighted))

    def _announce(self, name: str, form: float, different_form: TaskError) -> Callable[[], None]:
        number, code = self._number, self._codes[name]
        self._number += 1
        if self._size == 1:
            return lambda: None
        own = torch.tensor([code, code * code, form, form * form], dtype=torch.float64)
        handle = hvd.allreduce_async(own, op=hvd.Sum, name=f"hvdtrain.own_step.{number}")

        def check() -> None:
            # the mean and the mean square are this worker's only if all codes are equal
            is_equal = torch.eq(hvd.synchronize(handle), own * self._size).tolist()
            if not all(is_equal[:2]):
                raise different_calls(f"gradients() of {name!r}" if name else "the end", number)
            if not all(is_equal):
                raise different_form

        return check


class StepOptimizer(NotCalled):
    """One of the optimizers that a task's own step is given.

    Args:
        name: its name.
        optimizer: the optimizer.
        entries: the parameters that it trains.
        config: the config.
        calls: those of the step so far, of all its optimizers.
        size: number of workers.

    Attributes:
        unused: names of the parameters that no call of this step has reached; empty without a call.
        is_applied: whether ``apply`` was called in this step.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        entries: Sequence[Entry],
        config: Config,
        calls: Calls,
        *,
        size: int,
    ) -> None:
        check_takes_no_closure(name, optimizer)
        self.unused: set[str] = set()
        self.is_applied = False
        self._name = name
        self._optimizer = optimizer
        self._paths = [entry.path for entry in entries]
        self._parameters = [entry.tensor for entry in entries]
        self._clip_norm = config.clip_norm
        self._size = size
        self._new_reducer = partial(choose_reducer, config, size)
        self._reducers: list[GradientReducer] = []  # one for each call of a step, so that names differ
        self._calls = calls
        self._own_calls = 0
        self._samples: StepPart | None = None
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
        """Collective. Return the mean gradient over the global batch, one tensor for each variable.

        Args:
            losses: one value per sample, or ``Weighted``.
            retain_graph: whether the losses, or what they were computed from, will be differentiated again.
        """
        samples = self._of_step()
        check_losses(losses, self._name)
        given = {f"what is given to the optimizer {self._name!r}": losses}
        check_values(given, len(samples.weights))
        values = weigh(given, len(samples.weights))
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
            gradients = [_owned(g, p) for g, p in zip(found, self._parameters, strict=True)]
            counted = None if values.loss_weights is None else torch.mv(values.rows, samples.weights)[1:]
            return self._reduced(gradients, counted, samples)

    def apply(self, gradients: Sequence[torch.Tensor]) -> None:
        """Clip the gradients, set the learning rate and take a step.

        Args:
            gradients: those of ``gradients``, or computed from them.
        """
        samples = self._of_step()
        found = [tuple(g.shape) if isinstance(g, torch.Tensor) else None for g in gradients]
        check_gradients(self._name, found, [tuple(p.shape) for p in self._parameters])
        self.is_applied = True
        if samples.learning_rate is None:
            return
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            # clipping would change the tensors of the task
            parameter.grad = gradient.detach() if self._clip_norm is None else gradient.detach().clone()
        self._is_stepping = True
        try:
            with torch.autocast(samples.weights.device.type, enabled=False):
                if self._clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
                for group in self._optimizer.param_groups:
                    group["lr"] = samples.learning_rate * group.get("lr_scale", 1.0)
                self._optimizer.step()
        finally:
            self._is_stepping = False
            for parameter in self._parameters:
                parameter.grad = None

    def minimize(self, losses: Any, retain_graph: bool = False) -> None:
        """Collective. Compute the gradients of the losses and apply them; see ``gradients``."""
        self.apply(self.gradients(losses, retain_graph))

    def begin(self, samples: StepPart | None) -> None:
        """Begin a step with these samples; None if no step is being done. Local: no collective."""
        self._samples = samples
        self._own_calls = 0
        if samples is not None:
            self.unused, self.is_applied = set(), False

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self._samples = None
        self._reducers.clear()

    def _of_step(self) -> StepPart:
        if self._samples is None:
            raise outside_of_step(self._name)
        return self._samples

    def _note_unused(self, found: Sequence[torch.Tensor | None]) -> None:
        missed = {path for path, gradient in zip(self._paths, found, strict=True) if gradient is None}
        check_reached(self._name, len(missed) < len(self._paths))
        self.unused = missed if self._own_calls == 0 else self.unused & missed

    def _reduced(
        self, gradients: list[torch.Tensor], counted: torch.Tensor | None, samples: StepPart
    ) -> list[torch.Tensor]:
        """Collective. Return the sums of gradients over workers, divided by the share that counted."""
        call, self._own_calls = self._own_calls, self._own_calls + 1
        if self._size > 1 and samples.learning_rate is not None:
            check = self._calls.announce(self._name, is_weighted=counted is not None)
            reducer = self._reducer(call)
            if isinstance(reducer, AllReduce):  # the check then waits for no round of its own
                reducer.start(gradients)
            check()
            handle = None
            if counted is not None:  # on all workers, as the check has found
                name = f"hvdtrain.counted.{self._name}.{call}"
                handle = hvd.allreduce_async_(counted, op=hvd.Sum, name=name)
            try:
                gradients = reducer.finish(gradients)
            finally:
                if handle is not None:
                    hvd.synchronize(handle)
        if counted is None:
            return gradients
        factor = torch.where(counted > 0, samples.total_weight / counted, 1.0)
        return list(torch._foreach_mul(gradients, factor.squeeze(0)))

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


class OwnStep:
    """A task's own training step.

    Args:
        step: what the task does in a step.
        optimizers: its optimizers, by name.
        trainable: the trainable parameters.
        config: the config.
        ema: the moving average of the weights.
        size: number of workers.
    """

    def __init__(
        self,
        step: Step,
        optimizers: Mapping[str, torch.optim.Optimizer],
        trainable: Sequence[Entry],
        config: Config,
        ema: ExponentialMovingAverage,
        *,
        size: int,
    ) -> None:
        self._step = step
        self._ema = ema
        self._size = size
        self._is_running = False
        self._calls = Calls(list(optimizers), size)
        for entry in trainable:  # before the hooks of reducers
            entry.tensor.register_post_accumulate_grad_hook(self._refuse)  # type: ignore[no-untyped-call]
        self._optimizers: dict[str, StepOptimizer] = {}
        for name, optimizer in optimizers.items():
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            entries = [entry for entry in trainable if id(entry.tensor) in own]
            self._optimizers[name] = StepOptimizer(name, optimizer, entries, config, self._calls, size=size)
        self._given = Optimizers(self._optimizers)

    def begin(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self._is_running = False
        for optimizer in self._optimizers.values():
            optimizer.forget()

    def run(self, model: Any, batch: Mapping[str, Any], number: int, samples: StepPart) -> dict[str, Any]:
        """Collective. Do the task's step and return its loss, the first, and its metrics by name.

        Args:
            model: the model.
            batch: the samples, with flat names.
            number: of the step, counted from 0.
            samples: their weights, and the learning rate.
        """
        self._given.step = number
        self._calls.begin()
        for optimizer in self._optimizers.values():
            optimizer.begin(samples)
        self._is_running = True
        try:
            losses, metrics = self._step(model, batch, self._given)
        finally:
            self._is_running = False
            for optimizer in self._optimizers.values():
                optimizer.begin(None)
        return {"loss": losses, **metrics}

    def unused(self) -> list[str]:
        """Return the parameters that the losses given to their optimizer did not reach in the last step."""
        return [f"model/{path}" for one in self._optimizers.values() for path in sorted(one.unused)]

    def not_applied(self) -> list[str]:
        """Return the optimizers that took no step in the last step."""
        return [name for name, optimizer in self._optimizers.items() if not optimizer.is_applied]

    def reduce(self, vector: torch.Tensor, names: Sequence[str], weighted: Sequence[str]) -> torch.Tensor:
        """Collective. Sum the step's vector over workers and return it.

        Args:
            vector: the sums of the loss and the metrics, and what follows them.
            names: "loss" and the metrics.
            weighted: those of them that are Weighted.
        """
        if self._size > 1:
            check = self._calls.announce_end(names, weighted)
            handle = hvd.allreduce_async_(vector, op=hvd.Sum, name="hvdtrain.metrics")
            check()
            hvd.synchronize(handle)
        return vector

    def ema(self, step: int) -> None:
        """Take the weights into their moving average.

        Args:
            step: steps done, this one included.
        """
        self._ema.update(self._ema.share(step))

    def _refuse(self, parameter: torch.Tensor) -> None:
        """Refuse gradients that a backward pass of the task's own has added to a parameter; a hook."""
        if self._is_running:
            parameter.grad = None
            raise accumulated("backward()")


def _owned(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient in memory of its own, laid out as its parameter; zeros if it was not reached."""
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.is_sparse:
        return gradient.clone()
    return torch.empty_like(parameter).copy_(gradient)
