"""The rules by which a worker counts as stopped, stalled or gone, and who is named."""

import pytest

from hvdtrain.elastic.watch.liveness import Liveness, Member, Silent, Stalled, WorkerState, blame, read_state
from hvdtrain.workers.activity import READING_DATA, TRAINING, Activity

ROOT, ONE, TWO = Member(0, "h1"), Member(1, "h2"), Member(2, "h2")


def doing(name=TRAINING, step=12, age=0.0, is_long=False, user_code=""):
    activity = Activity(name, 0.0, is_long, 0, step)
    return WorkerState(str(activity), 0, step, activity.place, is_long, age, user_code)


def liveness(others=(ONE, TWO), timeout=120.0):
    return Liveness(ROOT, list(others), timeout, 0.0)


def test_a_process_that_does_not_answer_is_named_with_what_it_did_last():
    rules = liveness()
    for second in range(1, 121):
        rules.beat(2, doing(age=second), float(second))
        if second == 1:
            rules.beat(1, doing(step=1204), 1.0)
    assert rules.judge(doing(age=120), 120.0) is None
    event = rules.judge(doing(age=121), 121.0)
    assert isinstance(event, Silent)
    assert event.ranks == (1,)
    assert event.problem == (
        "rank 1 on h2 has not answered for 120 s: stopped or starved; last it was in training step 1,204"
    )


def judged(own, one, two, at=121.0, timeout=120.0):
    rules = liveness(timeout=timeout)
    rules.beat(1, one, at)
    rules.beat(2, two, at)
    return rules.judge(own, at)


def test_the_worker_that_others_wait_for_is_named_with_the_place_in_the_users_code():
    reading = doing(READING_DATA, 12, age=130, user_code="data.py, line 7, in __getitem__")
    event = judged(doing(age=130), reading, doing(age=130))
    assert isinstance(event, Stalled)
    assert event.ranks == (1,)
    assert event.problem.endswith("reading data for training step 12 (data.py, line 7, in __getitem__)")


def test_workers_that_cannot_be_told_apart_are_all_named_and_nobody_as_long_as_one_makes_progress():
    assert judged(doing(age=1), doing(READING_DATA, age=500), doing(age=500)) is None
    event = judged(doing(age=130), doing(age=125), doing(age=140))
    assert event.ranks == ()
    assert event.problem.startswith("no worker has made progress for 125 s: rank 0 on h1 is in training step")


@pytest.mark.parametrize(("timeout", "age", "ends"), [(120, 1201, True), (5, 599, False)])
def test_long_work_that_others_wait_for_has_ten_times_as_long_or_ten_minutes(timeout, age, ends):
    saving = doing("saving after step", 11, age, is_long=True)
    event = judged(doing(age=age), saving, doing(age=age), timeout=timeout)
    assert (event is not None) == ends


def test_long_work_of_a_worker_that_itself_waits_changes_nothing():
    evaluating = doing("evaluating after step", 12, 130, is_long=True)
    event = judged(evaluating, doing(READING_DATA, 12, age=130), evaluating)
    assert event is not None
    assert event.ranks == (1,)


def test_a_process_that_was_stopped_itself_begins_anew_and_who_said_goodbye_is_neither_silent_nor_gone():
    rules = liveness([ONE])
    rules.forgive(500.0)
    assert rules.judge(doing(), 619.0) is None
    assert isinstance(rules.judge(doing(), 620.0), Silent)
    rules.drop(1)
    assert rules.judge(doing(age=1e6), 1e6) is None
    assert rules.left(1) is None


def test_who_is_behind_is_waited_for():
    assert blame({0: doing(TRAINING, 13), 1: doing(READING_DATA, 13)}) == [1]
    assert blame({0: doing(TRAINING, 13), 1: doing(TRAINING, 12)}) == [1]
    assert blame({0: doing("saving after step", 12), 1: doing(READING_DATA, 13)}) == [0]
    assert blame({0: doing("opening the data", 0), 1: doing("building the model", 0)}) == []
    user = doing("opening the data", 0, user_code="task.py, line 3, in train_data")
    assert blame({0: doing("comparing the data", 0), 1: user}) == [1]
    assert blame({0: user, 1: user}) == []


def test_what_a_worker_tells_of_itself_survives_the_way_and_nonsense_does_not():
    state = doing(user_code="x.py, line 1, in f")
    assert read_state(list(state)) == state
    for nonsense in (None, [], ["x"], [1, *list(state)[1:]], {"name": "x"}):
        assert read_state(nonsense) is None
