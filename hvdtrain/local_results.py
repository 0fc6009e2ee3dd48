"""What the loop does with the metrics of local steps: it keeps those of the first that diverged."""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from hvdtrain.backends.base import PendingMetrics, local_steps
from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.data.eval_sets import TRAINING_DATA
from hvdtrain.data.numeric import describe_not_finite
from hvdtrain.errors import NonFiniteLossError, PeerLostError
from hvdtrain.metrics import DelayedMetrics, StepInfo, is_finite
from hvdtrain.session import Session
from hvdtrain.training_plan import Progress, TrainingPlan
from hvdtrain.workers.activity import ACTIVITY

_CALMER = "Lower the learning rate, lengthen the warm-up or clip the gradient (--clip-norm)."
_CLEANER = "Remove such samples, or replace the values."


def is_diverged(metrics: StepMetrics) -> bool:
    """Return whether training cannot go on after a step with these metrics."""
    return metrics.overflow_exhausted or not is_finite(metrics)


def divergence(
    session: Session, plan: TrainingPlan, step: StepInfo, metrics: StepMetrics, *, is_alone: bool
) -> NonFiniteLossError:
    """Collective, unless alone. Return the error of a loss that is not finite; such data are named."""
    problem = f"the loss is {_loss(metrics)} at step {step.step}, with learning rate {step.learning_rate:g}"
    remedy = _CALMER
    gathered = [_not_finite_data(session, plan, step)]
    if not is_alone:
        with suppress(PeerLostError):  # the loss is what is reported
            gathered = session.backend.workers.allgather_object(gathered[0])
    if found := next((text for text in gathered if text), ""):
        problem = f"{problem}: in the {TRAINING_DATA}, {found}"
        remedy = _CLEANER
    return NonFiniteLossError(problem, remedy, everywhere=True)


def local_divergence(
    session: Session,
    plan: TrainingPlan,
    step: StepInfo,
    metrics: StepMetrics,
    diverged: Sequence[tuple[StepInfo, StepMetrics]],
) -> NonFiniteLossError:
    """Collective. Return the error of a loss that is not finite on a worker in its local steps.

    Args:
        session: the run.
        plan: how the run is done.
        step: the local steps as one.
        metrics: their sums over all workers.
        diverged: the first local step of this worker whose loss is not finite, with its metrics, if any.
    """
    found = None
    for at, its in diverged[:1]:
        found = at.step, _loss(its), at.learning_rate, _not_finite_data(session, plan, at)
    workers = session.backend.workers
    gathered = workers.allgather_object((workers.host, found))
    bad = [(of[0], rank, host, of) for rank, (host, of) in enumerate(gathered) if of is not None]
    if not bad:  # finite numbers whose sum is not
        return divergence(session, plan, step, metrics, is_alone=False)
    number, rank, host, (_, loss, rate, text) = min(bad, key=lambda one: one[:2])
    where = f": in the {TRAINING_DATA}, {text}" if text else ""
    return NonFiniteLossError(
        f"the loss is {loss} at step {number} on rank {rank} ({host}), with learning rate {rate:g}, before "
        f"the workers synchronised at step {step.step}{where}",
        _CLEANER if text else _CALMER,
        everywhere=True,
    )


def _loss(metrics: StepMetrics) -> str:
    return "nan" if metrics.overflow_exhausted else f"{metrics.sums['loss']}"


def _not_finite_data(session: Session, plan: TrainingPlan, step: StepInfo) -> str:
    """Read this worker's samples of a step again; return the first that is not finite, in words."""
    with suppress(Exception):  # the loss is what is reported
        batch = session.data.batch_again(plan, Progress(step.step - 1, step.samples_before))
        return describe_not_finite(batch.arrays, batch.indices) if batch else ""
    return ""


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
            metrics = local_steps(self._session.backend).synchronize().read()
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
