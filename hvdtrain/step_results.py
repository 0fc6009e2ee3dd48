"""What the loop does with the metrics of steps: check, add up and report them."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from hvdtrain.backends.step_metrics import PendingVector, StepMetrics
from hvdtrain.backends.trained_set import follow_trained
from hvdtrain.callbacks import ON_STEP, ON_WINDOW
from hvdtrain.data.eval_sets import TRAINING_DATA
from hvdtrain.data.numeric import describe_not_finite
from hvdtrain.errors import NonFiniteLossError, PeerLostError, TaskError
from hvdtrain.metrics import StepInfo, Window
from hvdtrain.session import Session
from hvdtrain.storage.text import some
from hvdtrain.training_plan import Progress, TrainingPlan
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.stragglers import StragglerWatch

_SMALL_WEIGHT = 0.02  # a masked language model that looks at a tenth of its tokens is well above
_NAMED = 5  # skipped samples, and unused parameters, that a message names
_CALMER = "Lower the learning rate, lengthen the warm-up or clip the gradient (--clip-norm)."
_CLEANER = "Remove such samples, or replace the values."


class StepResults:
    """Takes each step's metrics when they arrive: checks them, adds them to the window, reports windows.

    They are read when the next step has been launched: the host prepares a step while the device is busy with
    the one before. What it does with a step is in two parts. The first is this worker's own, and is done
    whole, once; the second reports of the step what only all workers together know.
    """

    def __init__(self, session: Session, plan: TrainingPlan) -> None:
        self._session = session
        self._plan = plan
        self._waiting = deque[tuple[StepInfo, PendingVector]]()
        self._is_local = session.config.sync_every is not None
        # the first of the local steps since the workers were last equal
        self._first_local: StepInfo | None = None
        # the first of them whose own loss is not finite
        self._diverged: tuple[StepInfo, StepMetrics] | None = None
        self._has_synchronized = False
        self._is_alone = False
        self._unused_are_reported = False
        self._small_weights_are_reported = False
        self.is_watched = True  # what was changed before the first step
        self._uncounted: int | None = 0  # samples until now of which none counts; None when one has
        self._stragglers = StragglerWatch()
        session.state.window.restart_clock()
        session.read_alone = self.read_alone

    def launched(self, step: StepInfo, pending: PendingVector) -> None:
        """Collective if a step has something to name. Take a new step, and add those before it."""
        is_logged = self._plan.is_due(self._session.config.log_every, step)
        self.is_watched = is_logged and ON_WINDOW in self._session.services.watched
        self._waiting.append((step, pending))
        if self._is_local:  # its metrics are this worker's own: they are not added
            self._first_local = self._first_local or step
            self._take_own(leave=1)
            return
        self.add(self._read(leave=1))
        if self.is_watched or ON_STEP in self._session.services.watched:
            self.read_all()

    def synchronized(self, step: StepInfo) -> StepInfo:
        """Collective after local steps. Make the workers equal and return these steps as one, which is added.

        After any other step the workers are equal already: return it.
        """
        if not self._is_local:
            return step
        self._take_own()
        # a framework may compile it when it is done first
        with ACTIVITY.during("averaging after step", step.step, is_long=not self._has_synchronized):
            metrics = self._session.backend.synchronize().read()
        self._has_synchronized = True
        first, self._first_local = self._first_local or step, None
        joined = replace(
            step,
            samples_before=first.samples_before,
            steps=step.step - first.step + 1,
            clock_seconds=time.perf_counter(),
        )
        self._session.state.last_step = joined
        self.add([(joined, metrics)])
        self._diverged = None
        return joined

    def read_all(self) -> None:
        """Collective if a step has something to name. Add the steps that were launched and not read."""
        if not self._is_local:
            self.add(self._read())

    def read_alone(self) -> None:
        """Add the steps that are done and were not read, after a collective failed. Local: no collective."""
        # What only all workers together can report about them is left out.
        self._is_alone = True
        self.read_all()

    def _read(self, leave: int = 0) -> Iterator[tuple[StepInfo, StepMetrics]]:
        """Read the metrics that are still waiting, but for so many."""
        while len(self._waiting) > leave:
            step, pending = self._waiting[0]
            metrics = pending.read()
            self._waiting.popleft()
            yield step, metrics

    def _take_own(self, leave: int = 0) -> None:
        """Keep the first local step whose loss is not finite."""
        for step, metrics in self._read(leave):
            if self._diverged is None and is_diverged(metrics):
                self._diverged = step, metrics

    def add(self, steps: Iterable[tuple[StepInfo, StepMetrics]]) -> None:
        """Collective if a step has something to name. Add steps, in order."""
        for step, metrics in steps:
            if metrics.flags.trained:  # which raises: this worker has changed nothing
                follow_trained(self._session.backend, self._session.config, step.step)
            self._add_own(step, metrics)
            if self._is_alone:
                self._session.deferred_error = None
                continue
            self._session.raise_deferred()
            if metrics.unused_parameters and not self._unused_are_reported:
                self._unused_are_reported = True
                gathered = self._session.backend.workers.allgather_object(metrics.unused_names)
                found = [f"{name} on rank {rank}" for rank, names in enumerate(gathered) for name in names]
                is_split = self._session.config.stages > 1
                acts = "; with --stages, momentum and weight decay act on it" if is_split else ""
                self._session.services.report.note(
                    f"no gradient reached {some(found, 4)} at step {step.step}; where another worker has "
                    f"one, this counts as zero{acts}"
                )
            if metrics.statistics.skipped_samples:
                name_skipped_samples(self._session)

    def _add_own(self, step: StepInfo, metrics: StepMetrics) -> None:
        session = self._session
        check_weights(f"step {step.step}", metrics)
        # a sample counts in an epoch, or a shorter run: the weights of the loss are not all 0
        if self._uncounted is None or metrics.weights.get("loss", metrics.weight) > 0:
            self._uncounted = None
        else:
            self._uncounted += step.samples - step.samples_before
            if self._uncounted >= session.data.size or self._plan.is_done(step):
                raise nothing_counts(f"{self._uncounted:,} samples of the training data")
        if is_diverged(metrics):
            raise self._divergence(step, metrics)
        if metrics.flags:
            session.wanted |= metrics.flags
        session.data.skipped.count += metrics.statistics.skipped_samples
        session.services.hooks.take(metrics.statistics)
        session.state.window.add(metrics, step.clock_seconds)
        try:
            session.services.report.on_step(step, metrics)
        except PeerLostError as error:
            session.deferred_error = error
        if self._plan.is_due(session.config.log_every, step):
            self._close_window(step)

    def _divergence(self, step: StepInfo, metrics: StepMetrics) -> NonFiniteLossError:
        """Collective, unless alone. Return the error of a loss that is not finite; such data are named.

        Of local steps, the first step and the rank whose own loss is not finite are named, if one's is.
        """
        workers, is_first = self._session.backend.workers, self._diverged is not None
        own, its = self._diverged or (step, metrics)
        loss = "nan" if its.overflow_exhausted else f"{its.sums['loss']}"
        data, rate = "", own.learning_rate
        if is_first or not self._is_local:
            with suppress(Exception):  # the loss is what is reported
                place = Progress(own.step - 1, own.samples_before)
                batch = self._session.data.batch_again(self._plan, place)
                data = describe_not_finite(batch.arrays, batch.indices) if batch else ""
        gathered = [(own.step, not is_first, not data, workers.rank, workers.host, rate, loss, data)]
        if not self._is_alone:
            with suppress(PeerLostError):  # the loss is what is reported
                gathered = workers.allgather_object(gathered[0])
        number, is_of_all, _, rank, host, rate, loss, data = min(gathered)
        of, synchronized = "", ""
        if not is_of_all:
            of = f" on rank {rank} ({host})"
            synchronized = f", before the workers synchronised at step {step.step}"
        where = f": in the {TRAINING_DATA}, {data}" if data else ""
        return NonFiniteLossError(
            f"the loss is {loss} at step {number}{of}, with learning rate {rate:g}{synchronized}{where}",
            _CLEANER if data else _CALMER,
            everywhere=True,
        )

    def _close_window(self, step: StepInfo) -> None:
        window, session, config = self._session.state.window, self._session, self._session.config
        speed = window.samples_per_second()
        session.services.speeds.append(speed)
        mean = window.weights.get("loss", window.weight) / window.weight
        is_rounded = "fp16" in (config.compression, config.precision)
        if is_rounded and 0 < mean < _SMALL_WEIGHT and not self._small_weights_are_reported:
            self._small_weights_are_reported = True
            session.services.report.note(
                f"the weights of the loss are {mean:.2g} on average; gradients are multiplied by them before "
                "they are rounded to fp16, and small ones are lost: multiply the weights, so that their mean "
                "is near 1"
            )
        more = {"data_wait_fraction": round(window.data_wait_fraction(step.workers), 6)}
        more |= {**window.busy.values(window.seconds), **session.services.hooks.values()}
        with session.defer_peer_loss():
            session.services.report.on_window(step, window.means(), speed, more | window.skipped())
        if text := self._stragglers.take(window.busy, window.seconds):
            session.services.report.note(f"{text} (step {step.step:,})")
        session.state.window = Window(started_seconds=step.clock_seconds)


def check_weights(when: str, metrics: StepMetrics) -> None:
    """Check the sums of the weights that the task's loss and metrics give."""
    for name, weight in metrics.weights.items():
        if not 0 <= weight < math.inf:
            raise TaskError(
                f"the weights of {name} must be finite and not negative; they add up to {weight:g} in {when}",
                "Check the samples' 'weights', or what the task's loss or metric returns as weights.",
                everywhere=True,
            )


def nothing_counts(of: str) -> TaskError:
    """Return the error of a loss that has no value, as all its weights are 0."""
    return TaskError(
        f"the loss of {of} has no value: all its weights are 0",
        "Check the data's 'weights', what the task's loss returns as weights, and whether all targets are "
        "ignore_index.",
        everywhere=True,
    )


def name_skipped_samples(session: Session) -> None:
    """Collective. Name the first few of the samples that could not be read."""
    skipped = session.data.skipped
    if len(skipped.reported) >= _NAMED:
        return
    own, skipped.unreported = skipped.unreported, []
    gathered = session.backend.workers.allgather_object(own[:_NAMED])
    for text in (text for of_worker in gathered for text in of_worker):
        if text not in skipped.reported and len(skipped.reported) < _NAMED:
            session.services.report.note(f"skipped {text}")
            skipped.reported.add(text)


def is_diverged(metrics: StepMetrics) -> bool:
    """Return whether training cannot continue after a step: a worker's NaN or infinity is in the sum."""
    return metrics.overflow_exhausted or not math.isfinite(metrics.sums["loss"])
