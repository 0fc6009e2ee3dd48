"""The driver's decisions while workers are lost and signals come: a case for each sentence of the design."""

import signal

import pytest
from support.elastic_play import Play, training

from hvdtrain.elastic import messages
from hvdtrain.elastic.driver import records
from hvdtrain.jobs.outcome import LAST_SAVE_SECONDS
from hvdtrain.workers.world import TrainingPosition


def test_as_many_workers_start_as_are_wanted_and_the_first_world_begins_when_all_are_ready():
    play = Play(records.Limits(wanted=2, least=1, most=4))
    play.come("w1")
    assert (play.state, play.started) == ("starting", ["w1", "w2"])
    play.come("w2")
    assert (play.state, play.names) == ("forming", ["w1", "w2"])
    assert (play.world.source, play.world.change) == ("start", None)
    play.form()
    assert "training with 2 workers (world 1)" in play.said


def test_after_the_start_timeout_fewer_workers_are_enough_and_the_missing_are_named():
    play = Play(records.Limits(wanted=3, least=2, most=3))
    play.come("w1", "w2")
    play.wait(59)
    assert play.state == "starting"
    play.wait(2)
    assert play.state == "forming"
    assert "2 of 3 workers are ready after the start timeout; missing: h1, slot 2" in play.said
    play.form()
    play.come("w3")  # it may come later
    play.wait(1.5)
    assert play.state == "changing"


def test_workers_that_build_are_waited_for_and_one_that_never_reports_is_given_up():
    play = Play(records.Limits(wanted=3, least=2, most=3))
    play.arrive("w1")
    play.arrive("w2")
    play.wait(300)
    assert (play.state, play.killed[:1]) == ("starting", ["w3"])
    assert "was still starting after 120 s, twice --start-timeout" in play.said
    play.ready("w1", "w2")
    assert play.names == ["w1", "w2"]


def test_first_workers_that_differ_end_the_job_with_what_differs():
    play = Play()
    play.arrive("w1")
    play.arrive("w2")
    play.ready("w1", digest="one", seed="1", epochs="3")
    play.ready("w2", digest="two", seed="2", epochs="3")
    assert play.finish.exit_code == play.told("w1", messages.End)[0].exit_code == 3
    assert play.finish.problem.endswith("\n  seed: 1 on rank 0 (h1), 2 on rank 1 (h1)")


def test_joiners_are_collected_and_enter_at_a_step_boundary():
    play = training(1, records.Limits(wanted=1, least=1, most=3))
    assert play.started == ["w1", "w2", "w3"]
    play.come("w2")
    play.wait(0.5)
    assert play.state == "training"
    play.come("w3")
    play.wait(0.6)
    assert play.state == "changing"
    assert play.told("w1", messages.ChangeWorld)
    assert not play.told("w1", messages.Abort)
    play.ready("w1")
    assert play.names == ["w1", "w2", "w3"]
    assert (play.world.source, play.world.root) == ("root", TrainingPosition(10))
    assert [one.is_new for one in play.world.members] == [False, True, True]
    play.form()
    assert "joined: h1, slot 1, h1, slot 2" in play.said


@pytest.mark.parametrize("is_long", [False, True])
def test_a_joiner_that_makes_no_progress_is_ended_unless_its_work_was_announced_to_take_long(is_long):
    play = training(1, records.Limits(wanted=1, least=1, most=2))
    play.arrive("w2")
    for second in range(1300):
        play.now += 1
        beat(play, "w1", 12, 0.0)
        beat(play, "w2", 0, float(second), is_long=is_long)
        if second == 1190:
            assert "w2" not in play.killed
    assert ("w2" in play.killed) != is_long
    assert play.state == "training"


def test_a_joiner_that_differs_is_refused_and_the_others_are_not_told():
    play = Play(records.Limits(wanted=1, least=1, most=2), (("h1", 2),))
    play.arrive("w1")
    play.ready("w1", seed="1")
    play.form()
    play.arrive("w2")
    play.ready("w2", digest="other", seed="2")
    assert "seed: 1 on rank 0 (h1), 2 on rank 1 (h1)" in play.told("w2", messages.Refuse)[0].problem
    play.die("w2", 3)
    play.wait(10)
    assert (play.state, play.members.generation) == ("training", 1)
    assert play.started == ["w1", "w2", "w3"]  # its slot again, after a second
    play.arrive("w3")
    play.ready("w3", digest="other")
    play.die("w3", 3)
    play.wait(15)
    assert play.started == ["w1", "w2", "w3"]  # now after 20 seconds
    play.wait(10)
    assert play.started[-1] == "w4"


@pytest.mark.parametrize("how", ["connection", "exit"])
def test_a_lost_member_breaks_the_world_and_the_next_has_the_others(how):
    play = training(3)
    actions = play.take(records.Lost("w3") if how == "connection" else records.Exited("w3", -9))
    assert play.state == "changing"
    assert [name for name in ("w1", "w2", "w3") if play.told(name, messages.Abort)] == ["w1", "w2"]
    assert records.Kill("w3") in actions
    play.die("w3", -9)
    play.ready("w1")
    assert play.state == "changing"
    play.ready("w2")
    assert play.names == ["w1", "w2"]
    assert play.world.change.left == ("rank 2 on h1: killed (SIGKILL)",)
    play.form()
    assert "left: rank 2 on h1: killed (SIGKILL)" in play.said
    assert "h1, slot 2" in str(play.slot("w3"))
    play.wait(1.1)
    assert play.slot("w4") == records.Slot("h1", 2)


def test_what_rank_0_has_recorded_is_not_told_again_if_its_world_breaks():
    play = training(4)
    play.die("w4")
    play.ready("w1", "w2", "w3")
    play.wait(5)
    for worker in play.names:
        play.say(worker, messages.Formed(generation=2))
    play.sync("w1")
    play.die("w3")
    play.ready("w2")
    play.wait(3)
    play.ready("w1")
    assert play.names == ["w1", "w2"]
    assert play.world.change.left == ("rank 2 on h1: killed (SIGKILL)",)
    assert play.world.change.why.startswith("rank 2 on h1")
    assert play.world.change.since_seconds == pytest.approx(3, abs=0.5)
    play.form()
    assert "after 8.0 s; left: rank 2 on h1: killed (SIGKILL); rank 3 on h1: killed" in play.said


def test_rank_0_is_who_got_furthest_and_the_old_rank_0_among_equals():
    for ahead, names in ((("w2", "w3"), ["w2", "w1"]), (("w3",), ["w1", "w2"])):
        play = training(3)
        play.step(11, *ahead)
        play.die("w3")
        play.ready("w2", "w1")
        assert play.names == names


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("is seen", "has not answered for 12"),
        ("is not seen", "has not answered for 12"),
        ("is that of its host", "its host does not answer"),
    ],
)
def test_a_frozen_member_or_host_is_left_behind_when_its_end_is_seen_or_its_lease_over(end, words):
    play = training(2)
    if end == "is that of its host":
        play.take(records.Lost("w2", is_unreachable=True))
    else:
        play.wait(119, silent=("w2",))
        assert play.state == "training"
        play.wait(2, silent=("w2",))
        assert "w2" in play.killed
        play.take(records.Exited("w2", -9))
    play.ready("w1")
    assert play.state == "changing"  # its connection still stands: it may not be dead
    play.take(records.Lost("w2")) if end == "is seen" else play.wait(4, silent=("w2",))
    assert play.names == ["w1"]
    assert words in play.world.change.left[0]


def beat(play, worker, step, age, *, is_long=False, code=""):
    play.say(worker, messages.Beat(state=["in training step", 1, step, 3 * step + 1, is_long, age, code]))


def test_a_member_that_makes_no_progress_is_named_with_its_code_and_killed():
    play = training(3)
    for second in range(125):
        play.now += 1
        for worker in ("w1", "w2", "w3"):
            beat(play, worker, 12, float(second), code="task.py, line 7" if worker == "w2" else "")
        if play.state == "changing":
            break
    assert "w2" in play.killed
    assert "w1" not in play.killed
    play.die("w2")
    play.ready("w1", "w3")
    assert "task.py, line 7" in play.world.change.left[0]


def test_a_member_that_does_not_leave_a_broken_world_is_given_up():
    play = training(3)
    play.die("w3")
    play.ready("w1")
    play.wait(119)
    assert play.state == "changing"
    play.wait(3)
    play.die("w2")
    assert play.names == ["w1"]
    assert "did not leave the world within 120 s" in play.world.change.left[0]


@pytest.mark.parametrize("has_entered", [True, False])
def test_a_failure_while_the_next_world_forms(has_entered):
    play = training(3)
    play.die("w3")
    play.ready("w1", "w2")
    if has_entered:
        play.say("w1", messages.Formed(generation=2))
    actions = play.die("w2")
    assert records.CloseStore() in actions
    aborted = play.told("w1", messages.Abort)[-1]
    assert (aborted.generation, aborted.again) == (2, not has_entered)
    play.ready("w1")
    assert play.names == ["w1"]
    assert len(play.world.change.left) == 2


def form_failed(play):
    play.say("w1", messages.FormFailed(generation=play.members.generation, reason="no route"))


def test_a_world_that_cannot_be_entered_is_tried_again():
    play = training(2)
    for attempt in range(12):
        if play.state == "forming":
            form_failed(play)
        play.ready("w1", "w2")
        assert play.state == "forming" or attempt > 9
    assert play.finish.exit_code == 3
    assert "could not enter a world 10 times" in play.finish.problem
    assert "no route" in play.finish.problem


def test_worlds_that_break_alike_though_they_trained_end_the_job():
    play = training(2)
    cause = "rank 1 on h1 lost its connection to the others"
    while play.state == "training":  # both have an error, and nobody is lost
        play.ready("w2")
        assert play.told("w1", messages.Abort)
        play.ready("w1")
        if play.state == "forming":
            play.form()
            change = play.world.change
            assert (change.left, change.joined, change.why) == ((), (), cause)
    assert f"(world 11) after 0.0 s; cause: {cause}" in play.said
    assert play.finish.exit_code == 3
    assert "made no step in a world 10 times in a row" in play.finish.problem
    assert cause in play.finish.problem


@pytest.mark.parametrize(("silent", "seconds"), [((), 1200), (("w2",), 120)])
def test_a_state_that_does_not_arrive_breaks_the_world_and_who_freezes_meanwhile_is_ended(silent, seconds):
    play = training(1, records.Limits(wanted=1, least=1, most=2))
    play.come("w2")
    play.wait(1.1)
    play.ready("w1")
    for worker in play.names:
        play.say(worker, messages.Formed(generation=play.members.generation))
    play.wait(seconds - 2, silent)
    assert play.state == "syncing"
    play.wait(4, silent)
    assert play.state == "changing"
    assert play.killed == list(silent)


def test_a_joiner_with_which_no_world_can_be_entered_is_left_out():
    play = training(1, records.Limits(wanted=1, least=1, most=2))
    play.come("w2")
    play.wait(1.1)
    play.ready("w1")
    for _ in range(2):
        assert play.names == ["w1", "w2"]
        form_failed(play)
        play.ready("w1", "w2")
    play.obey("w2")
    assert "is left out: 2 worlds with it could not be entered; the last time rank 0" in play.said
    assert play.names == ["w1"]
    play.form()
    assert play.state == "training"


def test_joiners_that_are_needed_are_tried_again():
    play = training(2, records.Limits(wanted=2, least=2, most=2))
    play.die("w2")
    play.ready("w1")
    play.wait(1.5)
    play.come("w3")
    for _ in range(4):
        form_failed(play)
        play.ready("w1", "w3")
        assert play.names == ["w1", "w3"]


def test_new_workers_are_told_the_run_directory_of_those_that_trained_and_are_lost():
    play = training(1, records.Limits(wanted=1, least=1, most=2))
    assert play.world.run_dir == ""
    play.say("w1", messages.Synced(generation=1, place=TrainingPosition(), run_dir="runs/one"))
    play.die("w1")
    play.wait(60)
    play.valid["w2"] = True  # whatever a new process says, it is never the source
    play.come("w2")
    assert (play.worlds["w2"].source, play.worlds["w2"].run_dir) == ("checkpoint", "runs/one")


def test_below_the_least_the_others_wait_and_go_on_with_a_new_worker():
    play = training(2, records.Limits(wanted=2, least=2, most=2))
    play.die("w2")
    play.ready("w1")
    assert play.state == "waiting"
    play.wait(25)
    assert play.said.count("waiting for workers: 1 of at least 2") == 3
    play.come("w3")
    assert play.names == ["w1", "w3"]
    assert play.world.change.since_seconds == pytest.approx(25, abs=1)


def test_below_the_least_for_too_long_the_rest_saves_and_ends():
    play = training(2, records.Limits(wanted=2, least=2, most=2, elastic_timeout=60), (("h1", 2),))
    play.discover(("h1", 1))
    play.die("w2")
    play.ready("w1")
    play.wait(61)
    assert play.world.purpose == "save"
    assert play.names == ["w1"]
    assert play.world.why.startswith("only 1 worker was left of at least 2 (--min-np) for 60 s")
    assert play.world.why.endswith("the last to fail: rank 1 on h1 killed (SIGKILL)")
    play.form()
    play.done("w1", code=75)
    assert (play.finish.exit_code, play.finish.problem) == (75, f"{play.world.why}: the state is saved")
    assert "--resume when there are slots for 2 workers or more, or with a lower" in play.finish.remedy


def test_nobody_left_within_the_elastic_timeout_ends_the_job():
    play = training(1, records.Limits(wanted=1, least=1, most=1, elastic_timeout=60), (("h1", 1),))
    play.discover()
    play.die("w1")
    play.wait(62)
    assert play.finish.exit_code == 75
    assert "only 0 workers were left of at least 1" in play.finish.problem
    assert "--resume" in play.finish.remedy


def test_a_job_whose_workers_never_come_ends():
    play = Play(records.Limits(wanted=2, least=2, most=2, elastic_timeout=100), ())
    play.wait(200)
    assert play.finish.exit_code == 3
    assert "0 of at least 2 workers (--min-np) came within 100 s" in play.finish.problem
    assert "doctor --host-discovery-script" in play.finish.remedy


def test_a_failure_that_all_would_have_ends_the_job_once():
    play = training(2)
    play.say("w2", messages.Failed(blame="code", problem="the loss is NaN", remedy="lower it", exit_code=4))
    assert (play.finish.exit_code, play.finish.problem) == (4, "")  # the worker says it
    assert play.finish.grace_seconds > LAST_SAVE_SECONDS
    told = play.told("w1", messages.End)[0]
    assert (told.problem, told.exit_code, told.speaks) == ("the loss is NaN", 4, False)
    assert [one.speaks for one in play.told("w2", messages.End)] == [True]


def test_a_failure_of_the_environment_costs_that_worker_only():
    play = training(2)
    play.say("w2", messages.Failed(blame="environment", problem="disk full", exit_code=3))
    assert play.told("w1", messages.Abort)
    play.ready("w1")
    assert play.state == "changing"
    play.wait(10.5)
    assert "w2" in play.killed  # it had time to end by itself
    play.die("w2", 3)
    assert play.world.change.left == ("rank 1 on h1: failed: disk full",)


def test_a_job_whose_workers_cannot_start_ends_with_their_failure():
    play = Play(records.Limits(wanted=2, least=1, most=2))
    for _ in range(2):
        for worker in play.started[-2:]:
            play.arrive(worker)
            play.say(worker, messages.Failed(blame="environment", problem="no GPU", exit_code=3))
            play.die(worker, 3)
        play.wait(1.5)
    assert play.finish.exit_code == 3
    assert "no GPU" in play.finish.problem


def crash(play, step, code=-11):
    """Let the first worker crash; the second stands at a step and gets a new neighbour."""
    first, second = play.names[-1], play.names[0]
    play.step(step, second)
    play.die(first, code)
    play.ready(second)
    if play.state == "forming":
        play.form()
    if play.state == "training":
        play.wait(50)
        play.come(play.started[-1])
        play.wait(1.1)
        play.ready(second)
        play.form()


@pytest.mark.parametrize(
    ("code", "times", "exit_code", "words"),
    [(-11, 3, 4, "a worker crashed 3 times"), (-9, 10, 3, "workers were lost 10 times")],
)
def test_workers_that_are_lost_at_one_step_again_and_again_end_the_job(code, times, exit_code, words):
    play = training(2, records.Limits(wanted=2, least=1, most=2, cooldown_seconds=(1, 2)))
    for _ in range(times):
        assert play.state == "training"
        crash(play, 10, code)
    assert play.finish.exit_code == exit_code
    assert f"{words} in a row at the same place after step 10" in play.finish.problem


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        (127, 127, "on h1, `python train.py` ended with exit code 127: the command was not found"),
        (1, 1, "`python train.py` ended with exit code 1 before it joined the job"),
        (-11, 3, "the worker on h1, slot 0 killed (SIGSEGV)"),
    ],
)
def test_a_command_that_ends_before_it_joins_is_named_with_its_exit_code(code, exit_code, words):
    play = Play(records.Limits(wanted=1, least=1, most=1), (("h1", 1),), command="python train.py")
    for worker in ("w1", "w2"):
        play.die(worker, code)
        play.wait(1.1)
    assert play.finish.exit_code == exit_code
    assert words in play.finish.problem
    assert ("hvd.elastic" in play.finish.remedy) == (code == 1), play.finish


def test_the_reset_limit_counts_broken_worlds():
    play = training(2, records.Limits(wanted=2, least=1, most=2, reset_limit=1, cooldown_seconds=(1, 2)))
    crash(play, 10, -9)
    assert play.state == "training"
    play.die("w1")
    assert play.finish.exit_code == 3
    assert "--reset-limit allows 1" in play.finish.problem


@pytest.mark.parametrize("in_time", [True, False])
def test_a_worker_that_wants_out_leaves_at_a_boundary_and_is_ended_if_it_takes_too_long(in_time):
    play = training(3)
    play.say("w1", messages.Leaving(why="SIGTERM"))
    assert play.state == "training"
    play.wait(2.1)
    assert play.told("w2", messages.ChangeWorld)
    play.ready("w1", "w2", "w3")
    assert play.told("w1", messages.Leave)
    assert not play.told("w2", messages.Leave)
    assert play.state == "changing"  # it may still save
    if in_time:
        play.obey("w1")
    else:
        play.wait(11)
        assert "w1" in play.killed
        play.die("w1")
    assert play.names == ["w2", "w3"]
    assert play.world.change.left == ("rank 0 on h1: SIGTERM",)
    play.form()
    if in_time:
        play.wait(60)
        assert len(play.started) == 3  # its slot may be about to go


def test_workers_on_a_host_that_is_gone_leave_in_order():
    play = training(4, hosts=(("h1", 2), ("h2", 2)))
    play.discover(("h1", 2))
    play.wait(2.1)
    play.ready("w1", "w2", "w3", "w4")
    play.obey("w3", "w4")
    assert play.names == ["w1", "w2"]
    assert play.world.change.left[0] == "rank 2 on h2: h2, slot 0 is no longer among the hosts"
    play.form()
    play.discover(("h1", 2), ("h2", 2))
    assert len(play.started) == 6  # it is back


def test_workers_on_a_host_that_is_back_in_a_moment_stay_unless_they_want_out_themselves():
    play = training(4, hosts=(("h1", 2), ("h2", 2)))
    play.discover(("h1", 2))
    play.wait(1)
    play.discover(("h1", 2), ("h2", 2))
    play.wait(5)
    assert (play.state, play.told("w1", messages.ChangeWorld)) == ("training", [])
    play.discover(("h1", 2))
    play.say("w3", messages.Leaving(why="SIGTERM"))
    play.discover(("h1", 2), ("h2", 2))
    play.wait(2.1)
    play.ready("w1", "w2", "w3", "w4")
    play.obey("w3")
    assert play.names == ["w1", "w2", "w4"]


def test_training_is_complete_when_all_say_so_and_a_death_then_is_no_failure():
    play = training(4, records.Limits(wanted=4, least=1, most=5))
    play.arrive("w5")
    play.done("w1")
    assert play.state == "stopping"
    play.die("w2")
    play.ready("w3")
    assert play.told("w3", messages.End)[0].exit_code == 0
    play.done("w4")
    assert play.finish.exit_code == play.told("w5", messages.End)[0].exit_code == 0


def test_a_late_message_of_an_earlier_world_is_dropped():
    play = training(3)
    play.die("w3")
    play.ready("w1", "w2")
    play.say("w1", messages.Formed(generation=1))
    play.say("w1", messages.Synced(generation=1, place=TrainingPosition(3)))
    play.say("w1", messages.FormFailed(generation=1, reason="late"))
    assert play.state == "forming"


def test_nobody_is_blamed_for_the_time_in_which_the_driver_was_stopped():
    play = training(2)
    play.now += 500
    play.take(records.Tick(500))
    play.wait(2)
    assert play.state == "training"
    assert not play.killed


def test_workers_of_one_host_are_neighbours_and_the_hosts_of_the_world_are_known():
    play = training(4, hosts=(("h1", 2), ("h2", 2)))
    worlds = next(one for one in play.actions if isinstance(one, records.OpenWorld)).worlds
    found = [(one.host, one.local_rank, one.local_size, one.cross_rank, one.cross_size) for one in worlds]
    assert found == [("h1", 0, 2, 0, 2), ("h1", 1, 2, 0, 2), ("h2", 0, 2, 1, 2), ("h2", 1, 2, 1, 2)]
    assert not worlds[0].one_host
    assert training(2).world.one_host


def test_if_all_hosts_are_replaced_the_state_is_handed_over():
    play = training(2, records.Limits(wanted=2, least=1, most=2), (("h1", 2),))
    play.discover(("h2", 2))
    play.wait(30)
    assert play.state == "training"  # until somebody can take over
    play.come("w3", "w4")
    play.wait(2.1)
    play.ready("w1", "w2")
    play.obey("w2")
    assert play.names == ["w1", "w3"]  # no more than the most
    assert play.world.source == "root"
    play.form()
    play.wait(2.1)
    play.ready("w1", "w3")
    play.obey("w1")
    assert play.names == ["w3", "w4"]


def test_who_is_to_leave_stays_for_one_world_if_nobody_else_has_the_state():
    play = training(2)
    play.say("w1", messages.Leaving(why="SIGTERM"))
    play.die("w2")
    play.wait(1.5)
    play.come("w3")
    play.ready("w1")
    assert play.names == ["w1", "w3"]
    play.form()
    play.wait(2.1)
    play.ready("w1", "w3")
    play.obey("w1")
    assert play.names == ["w3"]


TERM = records.Signalled(signal.SIGTERM)


def test_a_signal_lets_all_save_and_stop_and_is_forwarded_after_the_grace_time():
    play = training(2)
    play.take(TERM)
    assert play.told("w1", messages.Stop)[0].signal == signal.SIGTERM
    assert play.state == "stopping"
    play.wait(29)
    assert not any(isinstance(one, records.Forward) for one in play.actions)
    play.wait(2)
    assert records.Forward("w2", signal.SIGTERM) in play.actions
    play.wait(600)
    assert play.finish.exit_code == 143
    assert "did not stop within 600 s" in play.finish.problem


def test_a_job_whose_workers_all_leave_says_so():
    play = training(1)
    play.say("w1", messages.Leaving(why="SIGTERM came"))
    play.wait(2.5)
    play.done("w1", code=75)
    assert play.finish.exit_code == 75
    assert "the only worker is to leave, and no other is ready (rank 0 on h1: SIG" in play.finish.problem
    assert "--resume" in play.finish.remedy


def test_the_first_signal_does_not_end_a_job_that_already_saves_because_all_workers_leave():
    play = training(2)
    play.say("w1", messages.Leaving(why="SIGTERM"))
    play.say("w2", messages.Leaving(why="SIGTERM"))
    play.wait(2.5)
    assert play.state == "stopping"
    assert play.told("w1", messages.Stop)[0].why.startswith("all 2 workers are to leave")
    play.take(TERM)
    assert play.state == "stopping"
    play.take(TERM)
    assert play.finish.exit_code == play.told("w1", messages.End)[0].exit_code == 143


def test_a_signal_before_anything_was_trained_ends_the_job():
    play = Play()
    play.come("w1")
    play.take(TERM)
    assert play.finish.exit_code == 143
    assert records.Forward("w2", signal.SIGTERM) in play.actions  # it still starts, and cannot be told
    assert records.Forward("w1", signal.SIGTERM) not in play.actions


def test_a_signal_while_workers_change_makes_the_next_world_one_that_stops_whoever_dies_then():
    play = training(3)
    play.die("w3")
    play.take(TERM)
    play.wait(60)
    assert len(play.started) == 3  # nobody is started for the end
    play.ready("w1", "w2")
    assert play.world.purpose == "stop"
    play.form()
    assert play.told("w1", messages.Stop)
    play.die("w2")
    play.ready("w1")
    assert (play.world.purpose, play.names) == ("stop", ["w1"])
    play.form()
    play.done("w1", code=75)
    assert play.finish.exit_code == 75


@pytest.mark.parametrize(("least", "state", "purpose"), [(1, "forming", "train"), (2, "waiting", "stop")])
def test_a_signal_while_a_world_forms_or_the_job_waits_stops_what_is_left_once_it_trains(
    least, state, purpose
):
    play = training(2, records.Limits(wanted=2, least=least, most=2))
    play.die("w2")
    play.ready("w1")
    assert play.state == state
    play.take(TERM)
    assert (play.world.purpose, play.names) == (purpose, ["w1"])
    assert not play.told("w1", messages.Stop)
    play.form()
    assert play.told("w1", messages.Stop)


def test_a_signal_while_nobody_has_the_state_and_ctrl_c_end_the_job_with_the_checkpoint():
    alone, play = training(1), training(2)
    alone.die("w1")
    alone.take(TERM)
    assert (alone.finish.exit_code, "--resume" in alone.finish.remedy) == (75, True)
    play.take(records.Signalled(signal.SIGINT))
    assert play.finish.exit_code == 130
    assert "--resume continues from the newest checkpoint" in play.finish.problem
