"""Whose error it is, and what a worker says of itself."""

import errno
import os

import pytest

from hvdtrain.elastic.member.orders import blame_for, hello
from hvdtrain.errors import (
    AgreementError,
    ConfigError,
    DataError,
    EnvironmentFault,
    ExchangeError,
    HorovodBuildError,
    Interrupted,
    NonFiniteLossError,
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


def test_a_worker_says_where_it_is():
    said = hello({"HVDTRAIN_ELASTIC": "127.0.0.1:4000", "HOROVOD_HOSTNAME": "h2"})
    assert (said.host, said.pid) == ("h2", os.getpid())
    assert hello({"HVDTRAIN_ELASTIC": "127.0.0.1:4000"}).host == os.uname().nodename
