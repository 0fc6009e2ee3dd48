"""``hvdtrain.launch``: what it refuses, how functions travel, and which error comes back."""

import io
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from unittest import mock

import pytest
from horovod.runner.http import http_client, http_server

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
    with channel.opened({"call": b"x", "number": 7}, is_local=True) as end:
        yield end


def worker_end(opened, rank: int = 0, **changes: str) -> channel.WorkerEnd:
    with mock.patch.dict(os.environ, {**opened.environ, **changes}):
        end = channel.WorkerEnd(rank)
        assert not set(opened.environ) & set(os.environ)  # what the function starts does not get the key
        return end


def test_functions_results_and_errors_travel(opened):
    end = worker_end(opened)
    assert end.function == {"call": b"x", "number": 7}
    assert opened.result() == (False, None)
    end.send_result(None)
    worker_end(opened, rank=1).send_error({"rank": 1})
    assert opened.result() == (True, None)
    assert opened.errors() == [{"rank": 1}]


def test_a_stranger_gets_and_sends_nothing(opened):
    place = opened.environ[channel.ADDRESS_VARIABLE]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"http://{place}/function/0", timeout=60)
    request = urllib.request.Request(f"http://{place}/results/0", data=b"gASVgg==", method="PUT")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=60)
    with pytest.raises(EnvironmentFault, match="cannot get the function"):
        worker_end(opened, **{channel.KEY_VARIABLE: "0" * 64})
    assert opened.result() == (False, None)


def test_a_server_without_the_key_is_not_believed(opened):
    """What it says is not unpickled."""
    with channel.opened({"number": 8}, is_local=True) as other:
        place = other.environ[channel.ADDRESS_VARIABLE]
        other._server.gate = None  # it answers everybody
        with pytest.raises(EnvironmentFault, match="does not have the key"):
            worker_end(opened, **{channel.ADDRESS_VARIABLE: place})


def test_what_takes_long_to_send_arrives(monkeypatch):
    """It has more time than Horovod gives messages and strangers."""
    urlopen = http_client.urlopen

    def open_slowly(request):
        response = urlopen(request)
        time.sleep(4)  # Horovod looks for connections that took too long twice a second
        return response

    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 1)
    monkeypatch.setattr(http_server.KVStoreHandler, "timeout", 2)
    monkeypatch.setattr(http_client, "urlopen", open_slowly)
    with channel.opened({"call": bytes(30_000_000)}, is_local=True) as end:
        assert len(worker_end(end).function["call"]) == 30_000_000


def test_an_address_that_does_not_answer_is_given_up(opened, monkeypatch):
    limits = []

    def connect(place, seconds):
        limits.append(seconds)
        if place[0] == "192.0.2.1":
            raise TimeoutError("timed out")
        return socket.create_connection(place, seconds)

    monkeypatch.setattr(channel, "create_connection", connect)
    place = opened.environ[channel.ADDRESS_VARIABLE]
    assert worker_end(opened, **{channel.ADDRESS_VARIABLE: f"192.0.2.1,{place}"}).function["number"] == 7
    assert limits == [3, 3]


def test_each_launch_has_a_key_of_its_own():
    keys = set()
    for _ in range(2):
        with channel.opened({}, is_local=True) as end:
            keys.add(end.environ[channel.KEY_VARIABLE])
    assert len(keys) == 2
    assert {len(key) for key in keys} == {64}


def sent(kind: str, rank: int = 1, **changes: object) -> dict:
    values = {"rank": rank, "host": "h", "kind": kind, "is_known": hasattr(errors, kind), "problem": "why"}
    others = {"remedy": "do", "traceback": "Traceback ...", "user_traceback": "", "signal": None}
    return {**values, **others, **changes}


def raised(*found: dict, code: int = 1) -> BaseException:
    return launch._error(mock.Mock(errors=lambda: list(found)), code)


def test_the_error_of_a_worker_comes_back_with_its_rank():
    error = raised(sent("ConfigError"))
    assert isinstance(error, errors.ConfigError)
    assert (error.problem, error.remedy) == ("rank 1 on h: why", "do")
    other = raised(sent("ValueError"))
    assert isinstance(other, WorkerFailure)
    assert (other.problem, other.remedy) == ("rank 1 on h: ValueError: why", "Traceback ...")


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


class Interrupts(io.StringIO):
    """A console at which a signal handler ends the script when something is first shown."""

    def write(self, text: str) -> int:
        is_first = not self.tell()
        super().write(text)
        if is_first:
            sys.exit(3)
        return len(text)


def test_what_workers_still_say_when_the_script_is_ended_is_shown(monkeypatch):
    says = "signal.signal(15, lambda *_: (print('x' * 300_000 + 'saved', flush=True), sys.exit(0)))"
    code = f"import signal, sys, time; {says}; print('begun', flush=True); time.sleep(600)"
    monkeypatch.setattr(sys, "stdout", Interrupts())
    with pytest.raises(SystemExit):
        launch.run_command([sys.executable, "-c", code], dict(os.environ))
    assert sys.stdout.getvalue().endswith("xsaved\n")


class Left(Exception):
    """Stands in for the end of the process."""


@pytest.fixture
def failing(opened, monkeypatch):
    """Ends a worker with an error; gives what comes back at the process that launched."""

    def fail(error: BaseException) -> BaseException:
        monkeypatch.setattr(worker.os, "_exit", mock.Mock(side_effect=Left))
        with pytest.raises(Left):
            worker._fail(worker_end(opened, rank=1), 1, error)
        return launch._error(opened, 1)

    return fail


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (errors.Interrupted(2), KeyboardInterrupt),
        (errors.Interrupted(15), EnvironmentFault),
    ],
)
def test_signals_of_workers_come_back(failing, error, kind):
    assert type(failing(error)) is kind
