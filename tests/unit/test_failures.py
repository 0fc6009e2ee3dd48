"""How a worker ends: what is said, by whom, and with which exit code."""

import signal
import threading
from queue import SimpleQueue
from unittest.mock import Mock

import pytest

from hvdtrain.elastic.watch.liveness import HostLost
from hvdtrain.errors import ConfigError, Interrupted, NonFiniteLossError, PeerLostError, WorkerFailure
from hvdtrain.jobs import failures
from hvdtrain.jobs.failures import end_worker, expect_answer


class Ended(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def end(monkeypatch, capsys):
    """Ends this worker on an error; gives exit code and what was said."""

    def run(error: BaseException, rank: int | None = None) -> tuple[int, str]:
        leave = Mock(side_effect=Ended)
        monkeypatch.setattr(failures.os, "_exit", leave)
        monkeypatch.setattr(failures.time, "sleep", lambda seconds: None)
        if rank is not None:
            monkeypatch.setenv("HOROVOD_RANK", str(rank))
        with pytest.raises(Ended):
            end_worker(error, False)
        said = capsys.readouterr()
        assert said.out == ""
        return leave.call_args.args[0], said.err

    return run


def test_the_exit_code_is_that_of_the_error_and_one_of_ours_is_shown_whole_and_called_a_bug(end):
    for error, code in ((ConfigError("x"), 2), (PeerLostError("x"), 3), (Interrupted(signal.SIGINT), 130)):
        assert end(error)[0] == code
    code, said = end(ZeroDivisionError("oh"))
    assert (code, said.startswith("Traceback") or "ZeroDivisionError" in said) == (1, True)
    assert said.endswith("hvdtrain: ZeroDivisionError: oh\n  This is a bug in hvdtrain: please report it.\n")


def test_rank_0_speaks_for_all_of_what_all_raise(end):
    for rank, speaks in ((None, True), (0, True), (1, False)):
        said = end(NonFiniteLossError("the loss is nan", everywhere=True), rank)[1]
        assert bool(said) == speaks


def test_workers_that_do_not_answer_end_the_process(monkeypatch, capsys):
    codes = SimpleQueue()
    monkeypatch.setattr(failures.os, "_exit", codes.put)
    with expect_answer(0.0, rank=2, host="beta"):
        assert codes.get(timeout=60) == 3
    assert capsys.readouterr().err.startswith(
        "hvdtrain: rank 2 on beta: the other workers did not answer within 0 s\n  Check that"
    )


def test_a_summary_that_cannot_be_written_does_not_keep_the_process(monkeypatch, capsys):
    """A disk that does not answer, or a lock that the main thread holds."""
    monkeypatch.setattr(failures, "_WRITE_DOWN_SECONDS", 0.01)
    codes, told, begun, release = [], [], threading.Event(), threading.Event()
    monkeypatch.setattr(failures.os, "_exit", codes.append)

    def hangs(problem: str) -> None:
        told.append(problem)
        begun.set()
        release.wait()

    failures.end_at_once(HostLost("host h2 is gone"), "", hangs)
    assert begun.wait(60)  # the thread may start later than the process would have ended
    release.set()
    assert (codes, told) == ([failures.EXIT_ENVIRONMENT], ["host h2 is gone"])
    assert "hvdtrain: host h2 is gone\n" in capsys.readouterr().err


def test_rank_0_names_the_problem_that_another_worker_left_a_moment_later(tmp_path):
    lost, failed = PeerLostError("another worker ended"), WorkerFailure("x")
    failures.exchange_cause(tmp_path / "elsewhere", 1, "h2", "the disk is full", failed)
    assert list(tmp_path.iterdir()) == []  # a directory that a host does not have is not made
    late = threading.Timer(0.15, failures.exchange_cause, (tmp_path, 1, "h2", "the disk is full", failed))
    late.start()
    found = failures.exchange_cause(tmp_path, 0, "h1", lost.problem, lost)
    late.join()
    assert found == "rank 1 on h2: the disk is full"
    assert list(tmp_path.iterdir()) == []
