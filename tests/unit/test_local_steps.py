"""Local steps in the loop, the plan and the rules: what happens when, without a framework."""

import pytest
from support.fakes import (
    FakeLocalBackend,
    FakeWorkers,
    asks,
    make_loop_session,
    on_every_rank,
    one_worker,
    trained,
)

from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.config import Config
from hvdtrain.errors import NonFiniteLossError
from hvdtrain.loop import run
from hvdtrain.training_plan import TrainingPlan


def test_a_local_step_is_read_when_the_next_is_launched_and_a_synchronisation_at_once(tmp_path):
    """Workers synchronise after every n steps and at the end, here of 5 steps of 4 samples, the last of 2."""
    backend, report, _ = trained(tmp_path, FakeLocalBackend(one_worker()), sync_every=3)
    assert [call for call in backend.calls if call.startswith(("train", "read", "synchronize"))] == [
        *("train 1", "train 2", "read own 1", "train 3", "read own 2", "read own 3"),
        *("synchronize 3", "read train 3"),
        *("train 4", "train 5", "read own 4", "read own 5", "synchronize 5", "read train 5"),
    ]
    assert report.steps == [3, 5]
    # means over five steps of 4 samples each
    assert report.windows == [(3, {"loss": 2.0}), (5, {"loss": 4.5})]


@pytest.mark.parametrize(("every", "due"), [(1, [2, 4, 5]), (3, [4, 5]), ("1epoch", [4, 5])])
def test_what_is_due_comes_at_the_first_synchronisation_at_or_after_its_step(tmp_path, every, due):
    backend = FakeLocalBackend(one_worker())
    fields = dict.fromkeys(("log_every", "eval_every", "save_every"), every)
    session = make_loop_session(tmp_path, backend, eval_size=4, sync_every=2, **fields)
    run(session)
    assert [step for step, _ in session.services.report.windows] == due
    assert [step for step, _ in session.services.report.evaluations] == due
    assert session.services.saver.steps == due


def test_a_worker_that_asks_to_stop_stops_all_at_the_next_synchronisation(tmp_path):
    def work(workers: FakeWorkers) -> tuple[int, bool]:
        backend = FakeLocalBackend(workers)
        session = make_loop_session(tmp_path, backend, sync_every=2, train_size=100)
        wanted = {3: ControlFlags(stop=True)} if workers.rank == 1 else {}
        run(session, asks(wanted, backend))
        return session.state.progress.step, session.stopped

    assert on_every_rank(["alpha", "beta"], work) == [(4, True), (4, True)]


def test_a_loss_that_is_no_number_is_named_with_its_step_and_rank(tmp_path):
    def work(workers: FakeWorkers) -> str:
        losses = {3: float("inf"), 4: float("nan")} if workers.rank == 1 else {}
        backend = FakeLocalBackend(workers, losses=losses)
        session = make_loop_session(tmp_path, backend, sync_every=4, train_size=100, learning_rate=0.25)
        with pytest.raises(NonFiniteLossError) as caught:
            run(session)
        assert not session.services.saver.steps
        return caught.value.problem

    (said,) = set(on_every_rank(["alpha", "beta"], work))
    assert said.startswith("the loss is inf at step 3 on rank 1 (beta), with learning rate 0.25, before the")


def test_replicas_are_compared_right_after_a_synchronisation_alone(tmp_path):
    def work(workers: FakeWorkers) -> list[str]:
        backend = FakeLocalBackend(workers)
        session = make_loop_session(tmp_path, backend, sync_every=2, train_size=20, check_replicas_every=3)
        run(session)
        return [call for call in backend.calls if call == "compare" or call.startswith("synchronize")]

    calls = on_every_rank(["alpha", "beta"], work)[0]
    assert calls == ["compare", "synchronize 2", "synchronize 4", "compare", "synchronize 5", "compare"]


def test_the_learning_rate_follows_one_workers_batch():
    fields = {"global_batch_size": 64, "base_batch_size": 4, "lr_scaling": "sqrt"}
    config = Config(framework="torch", learning_rate=0.5, sync_every=4, **fields)
    assert TrainingPlan.of(config, 4, 1000).learning_rate.peak == 0.5 * 2
