"""The shared loop: written once, for every framework and any number of workers.

It owns when things happen and which numbers they happen with; the backend owns the tensors.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from hvdtrain.backends.base import NO_REQUESTS, Requests, Totals
from hvdtrain.best import Best
from hvdtrain.data.feed import Feed
from hvdtrain.errors import ConfigError, NonFiniteLossError
from hvdtrain.metrics import LateReader, StepMark, Window, is_finite
from hvdtrain.patience import after_evaluation, in_words, is_over
from hvdtrain.replicas import check_replicas
from hvdtrain.schedule import Cadence
from hvdtrain.session import Layout, Progress, Session
from hvdtrain.skipped import tell_of_bad_samples


def run(session: Session, asked: Callable[[], Requests] = lambda: NO_REQUESTS) -> None:
    """Collective. Train from where the session stands to the end, or to where a worker asks to stop.

    Args:
        session: the run.
        asked: gives what this worker asks of all of them, since it was last called.

    Raises:
        NonFiniteLossError: where the loss became NaN or infinite.
        ReplicaDriftError: where the workers' parameters differ.
        PeerLostError: where another worker went away.
    """
    backend, config = session.backend, session.config
    layout = session.layout()
    account = _Account(session, layout)
    late = LateReader()
    check_replicas(backend)
    session.report.start(layout.steps, session.progress.step, session.seconds_before)
    if _is_left_to_evaluate(session, layout):
        evaluate(session, layout)
    if _ends_early(session, layout):
        session.report.note("to go on, raise early_stopping_patience or set early_stopping to null")
        return
    with session.train_feed(layout) as feed, session.index_trace() as trace:
        for batch in backend.to_device(trace.watch(feed)):
            session.learning_rate = _learning_rate(session, layout)
            backend.train_step(batch, session.learning_rate, _requests(session, asked, feed))
            mark = _advance(session, layout)
            trace.trained(batch.step)
            account.take(late.push(mark, backend.take_metrics("train")))
            if mark.step % config.check_replicas_every == 0:
                check_replicas(backend)
            is_best = ends_early = False
            if _eval_is_due(session, mark, layout):
                account.take(late.flush())
                with account.clock_stopped():
                    evaluate(session, layout)
                is_best = _note_best(session)
                _note_waiting(session)
                ends_early = _ends_early(session, layout)
            if is_best or ends_early or account.requested_any() or _save_is_due(session, mark, layout):
                account.take(late.flush())  # of a loss that is no number, nothing is saved
                with account.clock_stopped():
                    save(session)
                if ends_early:
                    break
                if account.stop_is_requested():
                    session.stopped = mark.samples < layout.last_sample
                    break
    account.take(late.flush())
    check_replicas(backend)


def evaluate(session: Session, layout: Layout) -> dict[str, float]:
    """Collective. Evaluate on the whole evaluation data, exactly, with averaged weights, and report it.

    Returns:
        Name to mean over the evaluation samples; the same on every worker.
    """
    backend = session.backend
    window = Window()
    backend.average_statistics()
    with session.eval_feed(layout) as feed, backend.averaged_weights():
        for batch in backend.to_device(feed):
            backend.eval_step(batch)
        told = replace(NO_REQUESTS, bad_samples=feed.take_notes()[0])
    totals = backend.take_metrics("eval", told if told.bad_samples else NO_REQUESTS).read()
    tell_of_bad_samples(session, totals.bad_samples)
    window.add(totals.without_bad_samples(), time.perf_counter())
    session.last_eval, session.last_eval_step = window.means(), session.progress.step
    session.report.evaluated(session.mark(), session.last_eval, window.samples_per_second())
    return session.last_eval


def save(session: Session) -> None:
    """Collective. Average the moving statistics and save; rank 0 writes, in the background."""
    session.backend.average_statistics()
    if session.backend.workers.rank == 0:
        session.saver.save(session.backend, session.record())


def _requests(session: Session, asked: Callable[[], Requests], feed: Feed) -> Requests:
    """Give what this worker asks for and tells; one whose checkpoints fail may ask to stop."""
    requests = asked()
    bad_samples, waited_seconds = feed.take_notes()
    if bad_samples or waited_seconds:
        requests = replace(requests, bad_samples=bad_samples, waited_seconds=waited_seconds)
    return replace(requests, stop=True) if session.saver.poll() else requests


def _learning_rate(session: Session, layout: Layout) -> float:
    """Give the learning rate of the next step: the schedule's value at its middle.

    So neither the first step of a warm-up nor the last of a decay is wasted on a rate of 0.
    """
    before = session.progress.samples
    middle = (before + layout.samples_after(before)) / 2
    return layout.learning_rate.at(middle / session.data_size)


def _advance(session: Session, layout: Layout) -> StepMark:
    """Move progress by the step that was done."""
    before = session.progress.samples
    session.progress = Progress(session.progress.step + 1, layout.samples_after(before))
    return session.mark(before)


def _is_due(cadence: Cadence | None, session: Session, mark: StepMark, last_sample: int) -> bool:
    """Whether something is due after this step: by its cadence, and at the end of training."""
    due = cadence is not None and cadence.due(mark.step, mark.samples_before, mark.samples, session.data_size)
    return due or mark.samples == last_sample


def _eval_is_due(session: Session, mark: StepMark, layout: Layout) -> bool:
    has_data = session.eval_data is not None
    return has_data and _is_due(session.config.eval_every, session, mark, layout.last_sample)


def _is_left_to_evaluate(session: Session, layout: Layout) -> bool:
    """Whether training was done before this run began, but not its last evaluation."""
    trained = session.progress.samples >= layout.last_sample
    return trained and session.eval_data is not None and session.last_eval_step != session.progress.step


def _save_is_due(session: Session, mark: StepMark, layout: Layout) -> bool:
    return _is_due(session.config.save_every, session, mark, layout.last_sample)


def _note_best(session: Session) -> bool:
    """Whether the evaluation just done is the best so far, by the metric that keep_best names."""
    best = session.config.keep_best
    if best is None:
        return False
    value = _last_value("keep_best", best, session)
    if not best.improves(value, session.best_value):
        return False
    session.best_value = value
    return True


def _note_waiting(session: Session) -> None:
    """Note what the evaluation just done means for early stopping. The same on every worker."""
    rule, waiting = session.config.early_stopping, session.waiting
    if rule is not None and waiting is not None:
        value = _last_value("early_stopping", rule, session)
        session.waiting = after_evaluation(waiting, rule, value, session.progress.step)


def _ends_early(session: Session, layout: Layout) -> bool:
    """Whether early stopping has waited long enough, before training is done anyway; say so."""
    config, progress, waiting = session.config, session.progress, session.waiting
    if waiting is None or config.early_stopping is None or progress.samples >= layout.last_sample:
        return False
    if not is_over(waiting, config.early_stopping_patience):
        return False
    why = in_words(waiting, config.early_stopping)
    session.stopped_early = f"stopped early at step {progress.step:,}: {why}"
    session.report.say(session.stopped_early)
    return True


def _last_value(field: str, best: Best, session: Session) -> float:
    """Give the metric that a field names, of the evaluation just done.

    Raises:
        ConfigError: where the evaluation gives no such metric.
    """
    if best.metric not in session.last_eval:
        raise ConfigError(
            f"{field}: there is no metric {best.metric!r}; the evaluation gives "
            f"{', '.join(session.last_eval)}",
            everywhere=True,
        )
    return session.last_eval[best.metric]


class _Account:
    """Takes each step's totals: checks them, adds them to the window, reports windows."""

    def __init__(self, session: Session, layout: Layout) -> None:
        self._session = session
        self._last_sample = layout.last_sample
        self._requests = NO_REQUESTS
        session.window.started_seconds = time.perf_counter()
        self._told_of_missing_gradients = False

    def take(self, steps: Iterable[tuple[StepMark, Totals]]) -> None:
        """Account for steps, in order.

        Raises:
            NonFiniteLossError: naming the step and its learning rate.
        """
        for mark, totals in steps:
            if not is_finite(totals):
                raise NonFiniteLossError(
                    f"the loss is {totals.sums['loss']} at step {mark.step}, "
                    f"with learning rate {mark.learning_rate:g}",
                    "Lower the learning rate, lengthen the warm-up or clip the gradient (--clip-norm).",
                    everywhere=True,
                )
            if totals.missing_gradients and not self._told_of_missing_gradients:
                self._tell_of_missing_gradients(mark)
            if totals.requests is not NO_REQUESTS:
                self._requests = self._requests.joined(totals.requests)
            tell_of_bad_samples(self._session, totals.bad_samples)
            window = self._session.window
            window.add(totals, mark.clock_seconds)
            self._session.report.stepped(mark, totals)
            if _is_due(self._session.config.log_every, self._session, mark, self._last_sample):
                means, speed = window.means(), window.samples_per_second()
                self._session.speeds.append(speed)
                waited = window.data_wait_fraction(mark.workers)
                self._session.report.trained(mark, means, speed, waited)
                self._session.window = Window(started_seconds=mark.clock_seconds)

    def requested_any(self) -> bool:
        """Whether a worker asked to save or to stop, as far as totals were read."""
        return self._requests is not NO_REQUESTS

    def stop_is_requested(self) -> bool:
        """Whether a worker asked to stop; what was asked until now is done with."""
        requests, self._requests = self._requests, NO_REQUESTS
        return requests.stop

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Context that leaves its own time, an evaluation's or a save's, out of the throughput."""
        stopped_seconds = time.perf_counter()
        yield
        self._session.window.started_seconds += time.perf_counter() - stopped_seconds

    def _tell_of_missing_gradients(self, mark: StepMark) -> None:
        """Collective: every worker reads the same totals, so all come here at the same step."""
        self._told_of_missing_gradients = True
        backend = self._session.backend
        names = backend.workers.allgather_object(backend.missing_gradient_names())
        found = [f"{name} on rank {rank}" for rank, missing in enumerate(names) for name in missing]
        shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        self._session.report.note(
            f"no gradient reached {shown} at step {mark.step}; zeros stand in for it, here and later"
        )
