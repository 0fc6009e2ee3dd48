"""What workers compare of their calls in a task's own step; each framework's ``step_calls.py`` sends it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from hvdtrain.backends.own_step import different_calls, different_metrics, different_weighting, metrics_code
from hvdtrain.errors import TaskError

Check = TypeVar("Check")


class CallsBase(ABC, Generic[Check]):
    """Checks that all workers make the same calls in a step, with an all-reduce of four numbers for each.

    If they did not, each would wait for sums that others do not compute. The numbers are two codes and their
    squares: the mean and the mean square are this worker's only if all codes are equal.

    Args:
        names: the optimizers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._codes = {"": 0.0} | {name: 1.0 + place for place, name in enumerate(names)}
        self._number = 0

    def begin(self) -> None:
        """Begin a step. Local: no collective."""
        self._number = 0

    def announce(self, name: str, is_weighted: bool) -> Check:
        """Collective. Begin the check of a call, which raises TaskError on all workers if calls differ.

        Args:
            name: the optimizer whose gradients are about to be reduced.
            is_weighted: whether its losses have weights of their own, which are then summed as well.
        """
        return self._announce(name, float(is_weighted), different_weighting(name, self._number))

    def announce_end(self, names: Sequence[str], weighted: Sequence[str]) -> Check:
        """Collective. Begin the check of the end of a step.

        It raises TaskError on all workers if another made a call or returned other metrics.

        Args:
            names: "loss" and the metrics that the step returned, which are summed by position.
            weighted: those of them that are Weighted.
        """
        return self._announce("", metrics_code(names, weighted), different_metrics(names, weighted))

    def _announce(self, name: str, form: float, different_form: TaskError) -> Check:
        number, code = self._number, self._codes[name]
        self._number += 1
        return self._compare(name, number, [code, code * code, form, form * form], different_form)

    def _different_call(self, name: str, number: int) -> TaskError:
        """Return the error of a call that is another one on another worker."""
        return different_calls(f"gradients() of {name!r}" if name else "the end", number)

    @abstractmethod
    def _compare(self, name: str, number: int, codes: list[float], different_form: TaskError) -> Check:
        """Collective. Begin to compare codes with those of the other workers.

        Args:
            name: the optimizer; nothing for the end of the step.
            number: how many calls of the step came before.
            codes: that of the call with its square, then that of its form with its square.
            different_form: the error if only the form differs.
        """
