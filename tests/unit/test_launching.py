"""``hvdtrain.launch``: what it refuses, how functions travel, and which error comes back."""

import contextlib
import io
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

import hvdtrain
from hvdtrain import errors
from hvdtrain.errors import EnvironmentFault, UsageError, WorkerFailure
from hvdtrain.launching import channel, launch, worker


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (({"fn": 3}), "takes a function, found a int"),
        (({"fn": nothing, "np": 0}), "np must be a whole number"),
        (({"fn": nothing, "np": True}), "np must be a whole number"),
        (({"fn": nothing, "controller": "nccl"}), "controller must be"),
        (({"fn": nothing, "hosts": "one"}), "has no number of workers"),
        (({"fn": nothing, "args": [threading.Lock()]}), "cannot be sent to the workers"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        hvdtrain.launch(arguments.pop("fn"), **arguments)


def test_a_worker_launches_no_workers(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(UsageError, match="one of 2 that horovodrun started"):
        hvdtrain.launch(nothing)


def test_without_horovodrun_the_command_that_helps_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentFault, match="build-horovod"):
        hvdtrain.launch(nothing)


@pytest.fixture
def opened():
    with channel.Channel(b"function", is_local=True) as end:
        yield end


def worker_end(opened, **changes: str) -> channel.WorkerEnd:
    with mock.patch.dict(os.environ, {**opened.environ, **changes}):
        end = channel.WorkerEnd()
        assert not set(opened.environ) & set(os.environ)  # what the function starts does not get the key
        return end


def address_of(opened) -> tuple[str, int]:
    host, _, port = opened.environ[channel.ADDRESS_VARIABLE].rpartition(":")
    return host, int(port)


def test_functions_results_and_errors_travel(opened):
    end = worker_end(opened)
    assert end.request(channel.FUNCTION) == b"function"
    end.request(channel.RESULT, b"x" * 30_000_000)
    worker_end(opened).request(channel.ERROR, b"error")
    assert opened.received == {channel.RESULT: [b"x" * 30_000_000], channel.ERROR: [b"error"]}


def test_a_stranger_gets_and_sends_nothing(opened):
    with pytest.raises(EnvironmentFault, match="cannot reach"):
        worker_end(opened, **{channel.KEY_VARIABLE: "0" * 64}).request(channel.RESULT, b"x")
    with socket.create_connection(address_of(opened), 20) as connection:
        assert len(connection.recv(99)) == 32
        connection.sendall(bytes(40))
        assert connection.recv(99) == b""
    assert opened.received == {channel.RESULT: [], channel.ERROR: []}


def test_a_recorded_request_is_refused(opened):
    sent = []
    not_sent = mock.patch.object(channel, "_send", lambda connection, *rest: sent.append(rest))
    soon = mock.patch.object(channel, "_STRANGER_SECONDS", 1.0)  # what is not sent is awaited no longer
    with not_sent, soon, pytest.raises(EnvironmentFault):
        worker_end(opened).request(channel.RESULT, b"x")  # whose bytes are those of another connection
    with socket.create_connection(address_of(opened), 20) as connection:
        connection.recv(99)
        with contextlib.suppress(ConnectionError):
            channel._send(connection, *sent[0])
            assert connection.recv(99) == b""
    assert opened.received[channel.RESULT] == []


def test_a_process_without_the_key_is_not_believed(opened):
    """What it sends is not unpickled."""
    with channel.Channel(b"other", is_local=True) as other:
        other._key = "0" * 64
        opened._key = other.environ[channel.KEY_VARIABLE]
        place = opened.environ[channel.ADDRESS_VARIABLE]
        with pytest.raises(EnvironmentFault, match="cannot reach"):
            worker_end(other).request(channel.FUNCTION)
        assert worker_end(other, **{channel.ADDRESS_VARIABLE: place}).request(channel.FUNCTION) == b"function"


def test_who_sends_nothing_is_sent_away_and_who_has_the_key_has_time(opened, monkeypatch):
    monkeypatch.setattr(channel, "_STRANGER_SECONDS", 0.5)
    with socket.create_connection(address_of(opened), 20) as connection:
        assert len(connection.recv(99)) == 32
        assert connection.recv(99) == b""
    proof = channel._proof

    def slowly(key: str, *parts: bytes) -> bytes:
        if len(parts) == 3:  # of the whole, after that of the size
            time.sleep(1)
        return proof(key, *parts)

    monkeypatch.setattr(channel, "_proof", slowly)
    worker_end(opened).request(channel.RESULT, b"late")
    assert opened.received[channel.RESULT] == [b"late"]


def test_an_address_that_does_not_answer_is_given_up(opened, monkeypatch):
    connect, limits = socket.create_connection, []

    def connected(place, seconds):
        limits.append(seconds)
        if place[0] == "192.0.2.1":
            raise TimeoutError("timed out")
        return connect(place, seconds)

    monkeypatch.setattr(channel.socket, "create_connection", connected)
    place = opened.environ[channel.ADDRESS_VARIABLE]
    end = worker_end(opened, **{channel.ADDRESS_VARIABLE: f"192.0.2.1,{place}"})
    assert [end.request(channel.FUNCTION), end.request(channel.FUNCTION)] == [b"function"] * 2
    assert limits == [3, 3, 3]  # the second time, the one that answered


def sent(kind: str, rank: int = 1, **changes: object) -> dict:
    values = {"rank": rank, "host": "h", "kind": kind, "problem": "why", "remedy": "do", "signal": None}
    return {**values, **changes}


def raised(*found: dict, code: int = 1) -> BaseException:
    return launch.error_of(found, code)


def test_the_error_of_a_worker_comes_back_with_its_rank():
    error = raised(sent("ConfigError"))
    assert isinstance(error, errors.ConfigError)
    assert (error.problem, error.remedy) == ("rank 1 on h: why", "do")


def test_the_cause_comes_back_and_not_the_loss_that_it_was_for_others():
    assert isinstance(raised(sent("PeerLostError", 0), sent("TaskError", 1)), errors.TaskError)
    assert isinstance(raised(sent("PeerLostError", 0)), errors.PeerLostError)


def test_what_the_launcher_ended_because_another_worker_was_killed_is_no_ctrl_c():
    ended = sent("Interrupted", 0, signal=15)
    error = raised(ended, code=137)
    assert isinstance(error, EnvironmentFault)
    assert error.problem == "the workers ended with exit code 137; rank 0 on h was ended by SIGTERM"
    assert isinstance(raised(ended, sent("PeerLostError", 1)), errors.PeerLostError)
    assert isinstance(raised(ended, sent("ConfigError", 1)), errors.ConfigError)


def test_what_workers_still_print_when_the_script_is_ended_is_shown(monkeypatch):
    ends = "signal.signal(15, lambda *_: (print('x' * 300_000 + 'saved', flush=True), sys.exit(0)))"
    code = f"import signal, sys, time; {ends}; print('begun', flush=True); time.sleep(600)"
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    wait = subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if timeout is None and not shown.getvalue():
            while not shown.getvalue():
                time.sleep(0.05)
            sys.exit(3)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(SystemExit):
        launch.run_command([sys.executable, "-c", code], dict(os.environ))
    assert shown.getvalue().endswith("xsaved\n")


class Left(Exception):
    """Stands in for the end of the process."""


@pytest.fixture
def failing(opened, monkeypatch):
    """Ends a worker with an error; gives what comes back at the process that launched."""

    def fail(error: BaseException) -> BaseException:
        monkeypatch.setattr(worker.os, "_exit", mock.Mock(side_effect=Left))
        with pytest.raises(Left):
            worker._fail(worker_end(opened), 1, error)
        return launch.error_of([pickle.loads(data) for data in opened.received[channel.ERROR]], 1)

    return fail


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (errors.Interrupted(2), KeyboardInterrupt),
        (errors.Interrupted(15), EnvironmentFault),
        (errors.Stopped("it has"), errors.Stopped),
        (errors.ConfigError("no"), errors.ConfigError),
        (ValueError("no"), WorkerFailure),
    ],
)
def test_errors_and_signals_of_workers_come_back(failing, error, kind):
    assert type(failing(error)) is kind
