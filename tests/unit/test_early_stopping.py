"""When a run stops early: the policy by itself, and the loop that follows it."""

import math

import pytest
from support.fakes import FakeBackend, make_loop_session, on_every_rank, one_worker

from hvdtrain import step_end
from hvdtrain.early_stopping import EarlyStoppingState, MetricGoal
from hvdtrain.errors import PeerLostError
from hvdtrain.loop import run


def session_of(tmp_path, workers, losses, patience=2, **fields):
    """Give a session that evaluates at each of its 5 steps (of 4 samples; 3 where two workers share)."""
    backend = FakeBackend(workers, eval_losses=losses)
    options = {"early_stopping": "loss", "early_stopping_patience": patience, "save_every": None, **fields}
    session = make_loop_session(tmp_path, backend, eval_size=7, eval_every=1, **options)
    session.state.early_stopping = EarlyStoppingState.continued(session.config.early_stopping, None)
    return session


@pytest.mark.parametrize(
    ("losses", "patience", "last"),
    [([0.5, 0.6, 0.7, 0.1, 0.1], 2, 3), ([0.5, 0.5, 0.1, 0.1, 0.1], 1, 2), ([0.5, 0.4, 0.3, 0.4, 0.5], 2, 5)],
)
def test_training_ends_after_the_evaluation_that_ends_patience_and_is_saved(tmp_path, losses, patience, last):
    session = session_of(tmp_path, one_worker(), losses, patience)
    run(session)
    assert (session.state.progress.step, session.services.saver.steps) == (last, [last])
    assert session.services.saver.manifests[-1].waiting == session.state.early_stopping
    assert bool(session.stopped_early) == (last < 5)


class StopsAt:
    """A callback that ends training at a step, and remembers when it was asked."""

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, list[int]()

    def should_stop(self, step, metrics) -> str:
        assert metrics["loss"] == 0.5
        self.asked.append(step.step)
        return "enough" if step.step == self.at else ""


def stoppable(tmp_path, workers, callbacks):
    session = session_of(tmp_path, workers, [0.5] * 5, early_stopping=None)
    session.services.stoppers = callbacks
    return session


@pytest.mark.parametrize("is_known", [True, False], ids=["on rank 0", "nowhere"])
def test_a_stop_survives_a_worker_that_is_lost_while_callbacks_answer(tmp_path, monkeypatch, is_known):
    """Rank 0 keeps its answer; where no answer is left, callbacks are called again."""
    callback = StopsAt(2)
    session = stoppable(tmp_path, one_worker(), [callback])

    ordinary, calls = step_end.run_on_rank_zero, iter(range(1, 9))

    def second_is_lost(workers, work, doing=""):
        if next(calls) != 2:
            return ordinary(workers, work, doing)
        if is_known:
            work()
        raise PeerLostError("rank 1 went away")

    monkeypatch.setattr(step_end, "run_on_rank_zero", second_is_lost)
    with pytest.raises(PeerLostError):
        run(session)
    session.settle()
    run(session)
    assert session.stopped_early == "stopped early at step 2: enough"
    assert (session.state.progress.step, session.services.saver.steps[-1]) == (2, 2)
    assert [step for step, _ in session.services.report.evaluations] == [1, 2]
    assert callback.asked == [1, 2]


def test_a_callback_of_rank_zero_ends_training_on_all_workers(tmp_path):
    def work(workers):
        callback = StopsAt(2 if workers.rank == 0 else 1)
        session = stoppable(tmp_path, workers, [StopsAt(9), callback])
        run(session)
        return session.state.progress.step, session.stopped_early, callback.asked

    said = "stopped early at step 2: enough"
    assert on_every_rank(["here"] * 2, work) == [(2, said, [1, 2]), (2, said, [])]


def test_a_metric_is_best_when_highest_unless_its_name_or_the_user_says_otherwise():
    names = {"accuracy": True, "top_5_error": False, "lossless": True, "low_loss/accuracy": True}
    for name, highest in names.items():
        assert MetricGoal.parse(name) == MetricGoal(name, highest)
    assert MetricGoal.parse("score:min") == MetricGoal("score", False)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_is_better_than_none_and_a_tie_is_no_improvement(sign):
    goal = MetricGoal("score", highest=sign == 1)
    assert goal.improves(0.5, None)
    for new, better in ((0.6, True), (0.5, False), (math.nan, False)):
        assert goal.improves(sign * new, sign * 0.5) == better
