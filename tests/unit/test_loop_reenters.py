"""The loop of an elastic job: left where a collective fails or the workers change, and entered again."""

from contextlib import suppress

import pytest
from support.fakes import FakeBackend, make_loop_session, on_every_rank

from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.errors import PeerLostError, WorldChanged
from hvdtrain.loop import run, save_and_stop
from hvdtrain.session import StepEnd

COLLECTIVE = ("train_step", "sync_statistics", "eval_metrics", "gather_state", "parameter_checksums")
REPORTED = ("on_start", "on_step", "on_window", "on_evaluation")


class Failing:
    """Lets the n-th call of a session's backend or report raise PeerLostError.

    A collective fails before it has done anything, a callback when the others of its hook were called.
    """

    def __init__(self, session, at: int | None) -> None:
        self.count, self.at = 0, at
        for owner, names in ((session.backend, COLLECTIVE), (session.services.report, REPORTED)):
            for name in names:
                self._wrap(owner, name, after=names is REPORTED)

    def _wrap(self, owner, name: str, after: bool) -> None:
        call = getattr(owner, name)

        def failing(*args, **kwargs):
            self.count += 1
            fails = self.count == self.at
            result = call(*args, **kwargs) if after or not fails else None
            if fails:
                raise PeerLostError(f"{name} failed")
            return result

        setattr(owner, name, failing)


def train(tmp_path, at: int | None = None, poll=ControlFlags, **fields):
    """Train as a job of one worker does that loses the others at the ``at``-th call; return what is seen."""
    tmp_path.mkdir(exist_ok=True)
    options = {"eval_every": 2, "save_every": 2, "log_every": 2, "trace_indices": True, **fields}
    session = make_loop_session(tmp_path, eval_size=7, **options)
    failing = Failing(session, at)
    for _ in range(2):
        try:
            run(session, poll)
            break
        except PeerLostError:
            session.settle()
    report = session.services.report
    seen = {
        "reported": (report.steps, report.windows, report.evaluations),
        "saved": session.services.saver.steps,
        "trace": (tmp_path / "indices" / "rank-0000.jsonl").read_text(),
        "progress": session.state.progress,
        "rates": sorted(set(session.backend.rates), reverse=True),
    }
    return seen, failing.count, session


@pytest.mark.parametrize("goal", [None, "loss:min"], ids=["all steps", "stops early"])
def test_whatever_call_fails_the_run_is_as_if_none_had(tmp_path, goal):
    stopping = {"keep_best": goal, "early_stopping": goal, "early_stopping_patience": 1, "epochs": 4}
    fields = stopping if goal else {}
    expected, calls, undisturbed = train(tmp_path / "undisturbed", **fields)
    assert bool(undisturbed.stopped_early) == bool(fields)
    for at in range(1, calls + 1):
        found, _, session = train(tmp_path / f"at-{at}", at, **fields)
        assert (found, session.stopped_early) == (expected, undisturbed.stopped_early), f"call {at}"
        assert session.backend.calls.count("train 3") == 1


@pytest.mark.parametrize(("asked", "left"), [(1, 2), (2, 3), (3, 3), (4, 5)])
def test_all_leave_at_the_step_at_which_they_read_that_one_asked(tmp_path, asked, left):
    """That is the step after it, or the step itself where something is due."""

    def work(workers):
        fields = {"epochs": 6, "eval_size": 7, "eval_every": 3, "save_every": 5}
        session = make_loop_session(tmp_path / str(workers.rank), FakeBackend(workers), **fields)
        calls = iter(range(1, 100))
        with pytest.raises(WorldChanged):
            run(session, lambda: ControlFlags(change=workers.rank == 1 and next(calls) == asked))
        state = session.state
        assert (state.step_end, session.services.report.steps[-1]) == (StepEnd.SAVED, left)
        first = [step for step, _ in session.services.report.evaluations]
        run(session)
        return state.progress.step, first, session.services.report.steps, session.services.report.evaluations

    for steps, first, reported, evaluations in on_every_rank(["here"] * 2, work):
        assert first == ([3] if left >= 3 else [])
        assert (steps, reported) == (8, list(range(1, 9)))
        assert [step for step, _ in evaluations] == [3, 6, 8]


def test_workers_that_are_done_do_not_change(tmp_path):
    session = make_loop_session(tmp_path, epochs=1)
    run(session, lambda: ControlFlags(change=session.state.progress.step >= 1))
    assert (session.state.progress.step, session.stopped) == (3, False)


def test_a_request_to_save_outlives_the_step_that_failed(tmp_path):
    """A signal asks once; the step that carried it to the others fails."""
    session = make_loop_session(tmp_path, epochs=4, save_every=None)
    Failing(session, 2)  # on_start, then the first step
    asked = iter([ControlFlags(save=True)])
    with pytest.raises(PeerLostError):
        run(session, lambda: next(asked, ControlFlags()))
    session.settle()
    run(session)
    assert session.services.saver.steps == [2, session.state.progress.step]


def test_a_worker_at_the_place_of_an_unfinished_step_does_what_it_has_left(tmp_path):
    def stopped_at(stage):
        session = make_loop_session(tmp_path, epochs=2, eval_size=7, eval_every=2, save_every=2)
        session.state.progress = session.state.progress.__class__(2, 8)
        session.state.last_step = session.step_info(0.1, 4)
        session.state.step_end, session.state.save_is_due = stage, stage == StepEnd.JUDGED
        run(session)
        return [step for step, _ in session.services.report.evaluations], session.services.saver.steps

    assert stopped_at(StepEnd.STEPPED) == ([2, 4, 5], [2, 4, 5])
    assert stopped_at(StepEnd.JUDGED) == ([4, 5], [2, 4, 5])
    assert stopped_at(StepEnd.SAVED) == ([4, 5], [4, 5])


def test_a_state_whose_save_was_lost_is_saved_before_the_next_step(tmp_path):
    session = make_loop_session(tmp_path, epochs=4, save_every=4)
    with suppress(WorldChanged):
        run(session, lambda: ControlFlags(change=len(session.backend.rates) == 4))
    assert (session.state.progress.step, session.services.saver.steps) == (6, [4])
    session.state.save_is_due = True
    run(session)
    assert session.services.saver.steps == [4, 6, 8, 10]


def test_a_world_that_only_saves_does_the_duties_and_stops(tmp_path):
    session = make_loop_session(tmp_path, epochs=4, eval_size=7, eval_every=2, save_every=None)
    Failing(session, 6)  # the statistics for the first evaluation
    with pytest.raises(PeerLostError):
        run(session)
    session.settle()
    save_and_stop(session)
    assert [step for step, _ in session.services.report.evaluations] == [2]
    assert (session.stopped, session.services.saver.steps) == (True, [2])
