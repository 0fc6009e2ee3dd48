"""When the loop saves, what it saves, and how it stops on request."""

import math

import pytest
from support.fakes import FakeBackend, FakeSaver, asks, make_loop_session, on_every_rank, one_worker, trained

from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.errors import NonFiniteLossError
from hvdtrain.loop import run


def saves(tmp_path, backend=None, **fields) -> list[int]:
    """Train five steps; give those that were saved at."""
    return trained(tmp_path, backend, **fields)[2].services.saver.steps


@pytest.mark.parametrize(
    ("every", "saved_at"), [("1epoch", [3, 5]), (2, [2, 4, 5]), (None, [5]), ("0.5epoch", [2, 3, 4, 5])]
)
def test_a_checkpoint_is_saved_when_due_and_once_at_the_end(tmp_path, every, saved_at):
    assert saves(tmp_path, save_every=every) == saved_at


def test_all_workers_gather_the_state_and_average_their_statistics_for_what_rank_0_saves(tmp_path):
    def work(workers):
        backend, _, session = trained(tmp_path, FakeBackend(workers), save_every=None)
        return session.services.saver.steps, backend.calls.count("gather"), backend.calls.count("average")

    assert on_every_rank(["here"] * 2, work) == [([3], 1, 1), ([], 1, 1)]


def test_a_save_comes_after_the_evaluation_of_its_step_with_averaged_statistics(tmp_path):
    backend, _, _ = trained(tmp_path, eval_size=7, epochs=1)
    assert backend.calls[-6:] == ["read train 3", "average", "read eval 3", "average", "gather", "save 3"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_is_saved_of_a_loss_that_is_no_number(tmp_path, value):
    session = make_loop_session(tmp_path, FakeBackend(one_worker(), losses={3: value}), save_every=1)
    with pytest.raises(NonFiniteLossError):
        run(session)
    assert session.services.saver.steps == [1, 2]


def test_a_record_has_the_metrics_of_its_own_step_only_and_the_last_ones_beside(tmp_path):
    backend = FakeBackend(one_worker(), eval_losses=[0.5, 0.25])
    manifests = trained(tmp_path, backend, eval_size=7, save_every=1)[2].services.saver.manifests
    assert [manifest.metrics for manifest in manifests] == [{}, {}, {"loss": 0.5}, {}, {"loss": 0.25}]
    assert [manifest.last_metrics for manifest in manifests] == [
        {}, {}, {"loss": 0.5}, {"loss": 0.5}, {"loss": 0.25},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("keep_best", "losses", "saved_at"),
    [
        ("loss", [0.5, 0.6, 0.4, 0.4, 0.9], [1, 3, 5]),
        ("loss", [math.nan, 0.5, math.nan, 0.6, 0.7], [2, 5]),
        ("loss:max", [0.5, 0.6, 0.4, 0.7, 0.1], [1, 2, 4, 5]),
        (None, [0.5, 0.4, 0.3, 0.2, 0.1], [5]),
    ],
    ids=str,
)
def test_the_best_evaluation_so_far_is_saved_too(tmp_path, keep_best, losses, saved_at):
    backend = FakeBackend(one_worker(), eval_losses=losses)
    fields = {"eval_size": 7, "eval_every": 1, "save_every": None, "keep_best": keep_best}
    assert saves(tmp_path, backend, **fields) == saved_at


@pytest.mark.parametrize(("asked_at", "saved_at"), [(1, [2, 5]), (3, [4, 5]), (4, [5]), (5, [5])])
def test_a_save_on_request_comes_a_step_later_and_training_goes_on(tmp_path, asked_at, saved_at):
    session = make_loop_session(tmp_path, save_every=None)
    run(session, asks({asked_at: ControlFlags(save=True)}, session.backend))
    assert session.services.saver.steps == saved_at
    assert (session.state.progress.step, session.stopped) == (5, False)


@pytest.mark.parametrize("asking", [{0}, {1}, {0, 1}])
def test_one_workers_request_stops_all_at_one_step_with_one_save(tmp_path, asking):
    def work(workers):
        session = make_loop_session(tmp_path, FakeBackend(workers), save_every=None, train_size=100)
        at = {2: ControlFlags(stop=True)} if workers.rank in asking else {}
        run(session, asks(at, session.backend))
        return session.state.progress.step, session.services.saver.steps, session.stopped

    assert on_every_rank(["here"] * 2, work) == [(3, [3], True), (3, [], True)]


def test_saves_that_fail_stop_all_where_the_saver_wants_it(tmp_path):
    def work(workers):
        session = make_loop_session(tmp_path, FakeBackend(workers), train_size=100, save_every=None)
        session.services.saver = FakeSaver(failed=workers.rank == 0)
        run(session)
        return session.state.progress.step, session.stopped

    assert on_every_rank(["here"] * 2, work) == [(2, True), (2, True)]
