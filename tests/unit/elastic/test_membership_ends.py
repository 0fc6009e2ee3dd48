"""How signals to the launcher end an elastic job, whatever it is at."""

import signal

import pytest
from support.elastic_play import Play, training

from hvdtrain.elastic.driver.records import Forward, Limits, Signalled
from hvdtrain.elastic.messages import End, Leaving, Stop

TERM = Signalled(signal.SIGTERM)


def test_a_signal_lets_all_save_and_stop_and_is_forwarded_after_the_grace_time():
    play = training(2)
    play.take(TERM)
    assert play.told("w1", Stop)[0].signal == signal.SIGTERM
    assert play.state == "stopping"
    play.wait(29)
    assert not any(isinstance(one, Forward) for one in play.actions)
    play.wait(2)
    assert Forward("w2", signal.SIGTERM) in play.actions
    play.wait(600)
    assert play.finish.exit_code == 143
    assert "did not stop within 600 s" in play.finish.problem


def test_a_job_whose_workers_all_leave_says_so():
    play = training(1)
    play.say("w1", Leaving(why="SIGTERM came"))
    play.wait(2.5)
    play.done("w1", code=75)
    assert play.finish.exit_code == 75
    assert "the only worker is to leave, and no other is ready (rank 0 on h1: SIG" in play.finish.problem
    assert "--resume" in play.finish.remedy


def test_the_first_signal_does_not_end_a_job_that_already_saves_because_all_workers_leave():
    play = training(2)
    play.say("w1", Leaving(why="SIGTERM"))
    play.say("w2", Leaving(why="SIGTERM"))
    play.wait(2.5)
    assert play.state == "stopping"
    assert play.told("w1", Stop)[0].why.startswith("all 2 workers are to leave")
    play.take(TERM)
    assert play.state == "stopping"
    play.take(TERM)
    assert play.finish.exit_code == play.told("w1", End)[0].exit_code == 143


def test_a_signal_before_anything_was_trained_ends_the_job():
    play = Play()
    play.come("w1")
    play.take(TERM)
    assert play.finish.exit_code == 143
    assert Forward("w2", signal.SIGTERM) in play.actions  # it still starts, and cannot be told
    assert Forward("w1", signal.SIGTERM) not in play.actions


def test_a_signal_while_workers_change_makes_the_next_world_one_that_stops_whoever_dies_then():
    play = training(3)
    play.die("w3")
    play.take(TERM)
    play.wait(60)
    assert len(play.started) == 3  # nobody is started for the end
    play.ready("w1", "w2")
    assert play.world.purpose == "stop"
    play.form()
    assert play.told("w1", Stop)
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
    play = training(2, Limits(wanted=2, least=least, most=2))
    play.die("w2")
    play.ready("w1")
    assert play.state == state
    play.take(TERM)
    assert (play.world.purpose, play.names) == (purpose, ["w1"])
    assert not play.told("w1", Stop)
    play.form()
    assert play.told("w1", Stop)


def test_a_signal_while_nobody_has_the_state_and_ctrl_c_end_the_job_with_the_checkpoint():
    alone, play = training(1), training(2)
    alone.die("w1")
    alone.take(TERM)
    assert (alone.finish.exit_code, "--resume" in alone.finish.remedy) == (75, True)
    play.take(Signalled(signal.SIGINT))
    assert play.finish.exit_code == 130
    assert "--resume continues from the newest checkpoint" in play.finish.problem
