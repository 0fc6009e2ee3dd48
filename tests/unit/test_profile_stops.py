"""A request to stop while steps are recorded: the checkpoint comes before the trace."""

import pytest
from support.fakes import FakeBackend, FakeSaver, asks, make_loop_session, on_every_rank

from hvdtrain.backends.step_signals import ControlFlags
from hvdtrain.loop import run
from hvdtrain.profiling.profile import NoProfile

STOP = {2: ControlFlags(stop=True)}


def ends_of(folder, workers, at=STOP, **fields) -> list[str]:
    """Return in which order the last save and the profile ended in the loop."""
    ended = []

    class Saver(FakeSaver):
        def finish(self, timeout_seconds=None) -> None:
            ended.append("save")

    class Recorded(NoProfile):
        def end(self, step) -> None:
            ended.append("profile")

    session = make_loop_session(folder, FakeBackend(workers), **fields)
    session.saver, session.profile = Saver(), Recorded()
    run(session, asks(at, session.backend))
    return ended


@pytest.mark.parametrize("hosts", [["h1"], ["h1", "h2"]])
def test_a_job_that_is_asked_to_stop_saves_before_it_writes_its_profile(tmp_path, hosts):
    """The launcher may leave it less time than a trace takes."""
    found = on_every_rank(hosts, lambda workers: ends_of(tmp_path, workers, profile="1-3"))
    assert found == [["save", "profile"]] * len(hosts)


@pytest.mark.parametrize(("at", "fields"), [({}, {"profile": "1-9"}), (STOP, {})])
def test_other_ends_do_not_wait_for_the_save_in_the_loop(tmp_path, at, fields):
    found = on_every_rank(["h1"], lambda workers: ends_of(tmp_path, workers, at, **fields))
    assert found == [["profile"]]
