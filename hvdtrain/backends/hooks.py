"""What takes part in the loop without being a part of it: a profile, a trace, the peak of memory."""

from contextlib import ExitStack
from typing import Any

from hvdtrain.backends.step_metrics import StepStatistics


class LoopHook:
    """A part of hvdtrain that takes part in the loop, such as a profile: override what is needed.

    The loop calls a list of hooks and knows none by name. All workers have the same ones in the same order,
    so that they may call collectives where it says so. Steps are counted from 1. As a context manager, a hook
    is entered before the first step with these workers and left after their last one or on an exception.
    """

    def on_workers(self) -> None:
        """Collective. Called before training starts or continues with these workers, and when it is over."""

    def before_step(self, step: int) -> None:
        """Collective. Called before the batch of a step is read, also if no such step follows."""

    def on_batch(self, batch: Any) -> None:
        """Local. Called just before a step.

        Args:
            batch: what the step is done with; it has its step, counted from 0, and its samples.
        """

    def after_steps(self, step: int) -> None:
        """Collective. Called when no step follows the last one, which was ``step``."""

    def measure(self, step: int) -> dict[str, float]:
        """Local. Return what this worker adds to the sums that travel with a step, as ``StepStatistics``."""
        return {}

    def take(self, sums: StepStatistics) -> None:
        """Local. Take the sums over all workers that travelled with a step."""

    def values(self) -> dict[str, float]:
        """Local. Return what a logged window or an evaluation has besides its metrics, by name."""
        return {}

    def __enter__(self) -> "LoopHook":
        """Return it."""
        return self

    def __exit__(self, *exception: Any) -> None:
        """Do nothing."""


class LoopHooks(LoopHook):
    """Hooks of the loop as one, which calls them in the order of their list.

    Args:
        hooks: the hooks.
    """

    def __init__(self, *hooks: LoopHook) -> None:
        self._hooks = hooks
        self._entered = ExitStack()

    def on_workers(self) -> None:
        """Collective. Call each."""
        for hook in self._hooks:
            hook.on_workers()

    def before_step(self, step: int) -> None:
        """Collective. Call each."""
        for hook in self._hooks:
            hook.before_step(step)

    def on_batch(self, batch: Any) -> None:
        """Local. Call each."""
        for hook in self._hooks:
            hook.on_batch(batch)

    def after_steps(self, step: int) -> None:
        """Collective. Call each."""
        for hook in self._hooks:
            hook.after_steps(step)

    def measure(self, step: int) -> dict[str, float]:
        """Local. Return what all of them return."""
        return {name: value for hook in self._hooks for name, value in hook.measure(step).items()}

    def take(self, sums: StepStatistics) -> None:
        """Local. Call each."""
        for hook in self._hooks:
            hook.take(sums)

    def values(self) -> dict[str, float]:
        """Local. Return what all of them return."""
        return {name: value for hook in self._hooks for name, value in hook.values().items()}

    def __enter__(self) -> "LoopHooks":
        with ExitStack() as entered:
            for hook in self._hooks:
                entered.enter_context(hook)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)
