"""Whose error it is, and what a worker says of itself."""

import errno
import os

import pytest

from hvdtrain.elastic.messages import MAX_TEXT
from hvdtrain.elastic.reports import blame_for, failure_of, hello, sendable
from hvdtrain.errors import (
    AgreementError,
    ConfigError,
    DataError,
    EnvironmentFault,
    ExchangeError,
    HorovodBuildError,
    Interrupted,
    NonFiniteLossError,
    PeerLostError,
    ReplicaDriftError,
    SaveError,
    TaskError,
    TrainingError,
    WorkerFailure,
)


@pytest.mark.parametrize(
    "error",
    [
        TaskError("x"),
        ConfigError("x"),
        DataError("x"),
        NonFiniteLossError("x"),
        ReplicaDriftError("x"),
        AgreementError("x"),
        ExchangeError("x"),
        SaveError("x"),
        WorkerFailure("x"),
        TrainingError("x"),
        EnvironmentFault("x", everywhere=True),
        ZeroDivisionError("a bug"),
    ],
)
def test_what_would_come_again_ends_the_job(error):
    assert blame_for(error) == "code"


@pytest.mark.parametrize(
    "error",
    [
        EnvironmentFault("x"),
        HorovodBuildError("x"),
        MemoryError(),
        OSError(errno.EIO, "disk"),
        Interrupted(2),
    ],
)
def test_the_others_go_on_without_a_worker_whose_host_failed(error):
    assert blame_for(error) == "environment"


def test_a_lost_peer_is_another_workers_error():
    assert blame_for(PeerLostError("x", everywhere=True)) == "peer"


@pytest.mark.parametrize(
    ("cause", "blame"),
    [
        (MemoryError(), "environment"),
        (OSError(errno.ESTALE, "stale file handle"), "environment"),
        (FileNotFoundError(errno.ENOENT, "no file"), "code"),
        (ValueError("shapes differ"), "code"),
    ],
)
def test_an_error_of_the_task_counts_by_its_cause(cause, blame):
    error = WorkerFailure("the task failed")
    error.__cause__ = cause
    assert blame_for(error) == blame


def test_a_failure_is_told_with_its_exit_code():
    told = failure_of(DataError("no\udc80 file", "make one"))
    assert (told.problem, told.remedy, told.exit_code) == ("no\\udc80 file", "make one", 2)
    assert failure_of(ValueError("a bug")).problem == "ValueError: a bug"
    assert failure_of(Interrupted(2)).exit_code == 130


def test_a_text_has_a_limit():
    assert len(sendable("\ud800" * 10**6)) == MAX_TEXT


@pytest.mark.parametrize(
    ("environ", "host", "slot"),
    [
        ({"HVDTRAIN_SLOT": "3", "HOROVOD_HOSTNAME": "h2", "SLURM_LOCALID": "1"}, "h2", 3),
        ({"SLURM_LOCALID": "1", "SLURMD_NODENAME": "n7"}, "n7", 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, os.uname().nodename, 0),
        ({}, os.uname().nodename, None),
    ],
)
def test_a_worker_says_where_it_is(environ, host, slot):
    said = hello({"HVDTRAIN_ELASTIC": "127.0.0.1:4000", **environ})
    assert (said.host, said.slot, said.pid) == (host, slot, os.getpid())
