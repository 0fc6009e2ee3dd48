"""The rules of training steps of a task's own: what they return and call, what optimizers train."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from hvdtrain.backends.objective.losses import counting_of
from hvdtrain.backends.objective.model_call import nested_batch
from hvdtrain.backends.objective.objective import checked_result
from hvdtrain.backends.records import DryRun
from hvdtrain.backends.reduction import choose_reducer
from hvdtrain.config import Config
from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS

# (model, batch, optimizers) -> (loss per sample, {metric name: value per sample}); each may be Weighted
Step = Callable[[Any, Mapping[str, Any], "Optimizers"], tuple[Any, dict[str, Any]]]


class Optimizers(dict[str, "StepOptimizerBase"]):
    """What a task's own step is given as ``optimizers``."""

    step: Any = 0  # the number of the step, counted from 0; equal on all workers

    def __missing__(self, name: str) -> NoReturn:
        raise TaskError(f"there is no optimizer {name!r}; the task has {', '.join(map(repr, self))}")


class StepPart(NamedTuple):
    """The samples of a step on one worker, and what an update with them needs, in tensors."""

    weights: Any  # (samples,)
    gradient_weights: Any  # (samples,): each sample's part in the mean gradient over the global batch
    learning_rate: Any  # that of the step; None in a dry run, which reduces and updates nothing


class CallsBase:
    """Checks that all workers make the same calls in a step, with an all-reduce of two numbers for each.

    If they did not, each would wait for sums that others do not compute. The numbers are a code and its
    square: mean and mean square are this worker's only if all codes are equal.
    """

    _compare: Any  # collective: begins to compare a call's codes, by its number, with those of others

    def __init__(self, workers: Any) -> None:
        self._workers = workers
        self.number = 0  # of the call within a step

    def announce(self, what: str) -> Any:
        """Collective. Begin the check of a call, which raises TaskError on all workers if calls differ."""
        self.number += 1
        different = TaskError(
            f"workers did not make the same calls in the same order: call {self.number} of a step is {what} "
            "on one worker and something else on another",
            "Decide by optimizers.step, which is equal on all workers, and not by losses or samples. Return "
            "the same metrics in the same order on all workers, the same ones of them Weighted.",
            everywhere=True,
        )
        # its square, summed over up to 2**13 workers, is exact in float64
        code = float(zlib.crc32(what.encode()) % (1 << 20))
        return self._compare([code, code * code], different)

    def announce_end(self, names: Sequence[str], weighted: Sequence[str]) -> Any:
        """Collective. Begin the check of the end of a step, of which all return the same names."""
        shown = ", ".join(f"{name!r} (Weighted)" if name in weighted else repr(name) for name in names)
        return self.announce(f"the end, with the values {shown},")


class StepOptimizerBase:
    """What both frameworks share of an optimizer that a task's own step is given."""

    variables: Any  # the parameters that it trains, in the order of the gradients
    learning_rate: Any  # that of this step; the largest one if its parameter groups have several
    gradients: Any  # collective: the mean gradient over the global batch, one tensor for each variable
    _apply: Any  # clips gradients, sets the learning rate and takes a step with them

    def __init__(self, name: str, config: Config, calls: Any, workers: Any) -> None:
        self.unused: Any = ()  # names of the parameters that no call of this step has reached
        self.is_applied = False  # whether ``apply`` was called in this step
        self._name, self._clip_norm = name, config.clip_norm
        self._calls, self._own_calls = calls, 0
        self._workers, self._new_reducer = workers, partial(choose_reducer, config, workers)
        self._samples: StepPart | None = None
        self._is_stepping = False

    def __getattr__(self, name: str) -> Any:
        """Refuse what a framework's optimizer would do with gradients of this worker alone."""
        if name not in ("step", "zero_grad", "backward", "apply_gradients"):
            raise AttributeError(name)
        raise TaskError(
            f"{name}() of the optimizer was called in the task's own step: it would use the gradients of "
            "this worker alone, and none are kept between calls",
            "Call minimize(losses), or gradients(losses) and then apply(gradients).",
        )

    def apply(self, gradients: Sequence[Any]) -> None:
        """Clip the gradients, set the learning rate and take a step."""
        samples = self._of_call()
        found = [tuple(one.shape) if hasattr(one, "shape") else None for one in gradients]
        wanted = [tuple(variable.shape) for variable in self.variables]
        if found != wanted:
            raise TaskError(
                f"apply() of the optimizer {self._name!r} was given {len(found)} gradients for {len(wanted)} "
                f"variables, of the shapes {found} for {wanted}",
                "Give the list that gradients() of the same optimizer returned, or one computed from it.",
            )
        self.is_applied = True
        if samples.learning_rate is None:
            return
        self._is_stepping = True
        try:
            self._apply(gradients, samples)
        finally:
            self._is_stepping = False

    def _check_step(self, *_: Any) -> None:
        """Refuse a step of the framework's optimizer that the task's own step takes by itself; a hook."""
        if self._samples is not None and not self._is_stepping:
            raise TaskError(
                f"the task's own step called step() of the optimizer {self._name!r} itself: gradients, "
                "clipping and the learning rate would be those of this worker alone",
                f"Use optimizers[{self._name!r}]: minimize(losses), or gradients() and apply().",
            )

    def minimize(self, losses: Any, *arguments: Any, **named: Any) -> None:
        """Collective. Compute the gradients of the losses and apply them; see ``gradients``."""
        self.apply(self.gradients(losses, *arguments, **named))

    def begin(self, samples: StepPart | None) -> None:
        """Begin a step with these samples; None if no step is being done. Local: no collective."""
        self._samples, self._own_calls = samples, 0
        if samples is not None:
            self.unused, self.is_applied = (), False

    def _check_losses(self, losses: Any, number: int) -> None:
        """Check that losses have one value for each of this number of samples."""
        shape = getattr(losses, "shape", None)
        if shape is None or tuple(shape) != (number,):
            found = f"a {type(losses).__name__}" if shape is None else f"the shape {tuple(shape)}"
            raise TaskError(
                f"what is given to the optimizer {self._name!r} must be one value per sample, of the shape "
                f"({number},); found {found}",
                "Take the mean over all axes but the first, and no mean over samples. Multiply losses by "
                "weights of your own: Weighted is for what the step returns.",
            )

    def _note_unused(self, names: Sequence[str], found: Sequence[Any]) -> None:
        """Note the parameters for which a call finds no gradient; they must not be all."""
        missed = [name for name, gradient in zip(names, found, strict=True) if gradient is None]
        if len(missed) == len(names):
            raise TaskError(
                f"the losses given to the optimizer {self._name!r} depend on none of its parameters",
                "Give it the losses of its own network, computed without detach() or no_grad() in between; "
                "in TensorFlow, all of it under the tape.",
            )
        known, self._own_calls = self._own_calls > 0, self._own_calls + 1
        self.unused = [name for name in missed if not known or name in self.unused]

    def _of_call(self) -> StepPart:
        """Return the samples of the step in which ``gradients`` or ``apply`` is called."""
        return self._of_step()

    def _of_step(self) -> StepPart:
        if self._samples is None:
            raise TaskError(
                f"the optimizer {self._name!r} was used outside of the task's own step",
                "Use it only inside of the method that is given it, and not in callbacks or threads.",
            )
        return self._samples


class CustomStepRules:
    """What both frameworks share of a task's own step; it stands before ``PlainStep``."""

    is_timed, is_own = False, True
    compared: Sequence[bool] = (False,)
    kinds: tuple[Any, Any]  # the classes of calls and of an optimizer that a step is given
    parts: Any
    workers: Any
    near: Any
    trace: Any
    _is_running = False  # whether the task's step is being called

    def attach(self, parts: Any) -> None:
        """Take the parts of the step. Local: no collective."""
        calls, optimizer = self.kinds
        self.parts, self._calls = parts, calls(self.near)
        self._step: Any = own_step_of(parts.task, parts.config)
        self._optimizers = {name: optimizer(name, parts, self._calls, self.near) for name in parts.optimizers}
        self._given = Optimizers(self._optimizers)
        self.trace()

    @contextmanager
    def _running(self, number: Any, samples: StepPart) -> Iterator[Optimizers]:
        """Return a context in which the task's step of this number is called with what it gives."""
        self._given.step, self._is_running = number, True
        self._calls.number = 0
        for optimizer in self._optimizers.values():
            optimizer.begin(samples)
        try:
            yield self._given
        finally:
            self._is_running = False
            for optimizer in self._optimizers.values():
                optimizer.begin(None)

    def completed(self, found: DryRun, training: bool) -> DryRun:
        """Return what a dry run has found, with what the step knows of it. Local: no collective."""
        self.parts.trained_set.look()
        if not training or found.error is not None:
            return found
        note, names = found.note, [name for name, one in self._optimizers.items() if not one.is_applied]
        if names:
            which = f"optimizer{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
            said = f"the task's own step took no step with the {which} at its first call"
            note = "; ".join(filter(None, [said, note]))
        return replace(found, note=note)


def own_step_of(task: Any, config: Config) -> Step | None:
    """Return the task's own training step, which is given nested batches; None if it has none."""
    row = FRAMEWORKS[config.framework]
    own = getattr(task, row.step_method, None)
    if own is None:
        if hasattr(task, row.optimizers_method):
            raise TaskError(
                f"the task has {row.optimizers_method}(model) and no {row.step_method}, which would use them",
                f"Add {row.step_method}, or give a single optimizer in {row.optimizer_method}.",
            )
        return None
    if hasattr(task, row.optimizers_method) and hasattr(task, row.optimizer_method):
        raise TaskError(
            f"the task has both {row.optimizers_method} and {row.optimizer_method}",
            f"Leave out {row.optimizer_method}, or give its optimizer a name in {row.optimizers_method}.",
        )
    counting_of(task, f"that of its own {row.step_method}")  # refuses class_weights, which it would not use

    def step(model: Any, batch: Mapping[str, Any], optimizers: Optimizers) -> tuple[Any, dict[str, Any]]:
        return checked_result(own(model, nested_batch(batch), optimizers), row.step_method)

    return step
