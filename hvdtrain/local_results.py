"""What the loop does with the metrics of local steps: it keeps those of the first that diverged."""

import time
from collections.abc import Iterable
from dataclasses import replace

from hvdtrain.backends.base import PendingMetrics
from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.divergence import is_diverged, local_divergence
from hvdtrain.errors import NonFiniteLossError
from hvdtrain.metrics import DelayedMetrics, StepInfo
from hvdtrain.session import Session
from hvdtrain.training_plan import TrainingPlan
from hvdtrain.workers.activity import ACTIVITY


class LocalResults:
    """The local steps since the workers were last equal, with this worker's own metrics.

    Args:
        session: the run.
        plan: how the run is done.
    """

    def __init__(self, session: Session, plan: TrainingPlan) -> None:
        self._session = session
        self._plan = plan
        self._delayed = DelayedMetrics()
        self._first: StepInfo | None = None
        self._diverged: list[tuple[StepInfo, StepMetrics]] = []  # the first one, if any
        self._diverged_before: list[tuple[StepInfo, StepMetrics]] = []  # of those that were synchronised last
        self._has_synchronized = False

    def launched(self, step: StepInfo, pending: PendingMetrics) -> None:
        """Take a local step, and read the metrics of the one before. Local: no collective.

        So the host is never more than a step ahead of the device, as in other jobs.
        """
        self._first = self._first or step
        self._take(self._delayed.push(step, pending))

    def synchronize(self, last: StepInfo) -> tuple[StepInfo, StepMetrics]:
        """Collective. Make the workers equal; return the local steps as one, and their sums over all workers.

        They are read at once: what a worker asks for is done here, and not after as many steps again.

        Args:
            last: the last of the local steps.
        """
        self._take(self._delayed.flush())
        # a framework may compile it when it is done first
        with ACTIVITY.during("averaging after step", last.step, is_long=not self._has_synchronized):
            metrics = self._session.backend.synchronize().read()
        self._has_synchronized = True
        first = self._first or last
        step = replace(
            last,
            samples_before=first.samples_before,
            steps=last.step - first.step + 1,
            clock_seconds=time.perf_counter(),
        )
        self._session.state.last_step = step
        self._first, self._diverged, self._diverged_before = None, [], self._diverged
        return step, metrics

    def divergence(self, step: StepInfo, metrics: StepMetrics) -> NonFiniteLossError:
        """Collective. Return the error of a loss that is not finite in the steps that were synchronised last.

        Args:
            step: these steps as one.
            metrics: their sums over all workers.
        """
        return local_divergence(self._session, self._plan, step, metrics, self._diverged_before)

    def _take(self, found: Iterable[tuple[StepInfo, StepMetrics]]) -> None:
        """Keep the first step whose loss is not finite, of any number of them."""
        if not self._diverged:
            self._diverged = [pair for pair in found if is_diverged(pair[1])][:1]
