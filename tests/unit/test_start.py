"""Starting Horovod: its failures, and workers that never arrive, end with a message and exit code 3."""

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from hvdtrain.backends import workers
from hvdtrain.backends.workers import abort_collectives, start_horovod
from hvdtrain.errors import EnvironmentFault, HorovodBuildError, UsageError
from hvdtrain.host.start_reports import start_limit, stopped_workers

GLOO = "Horovod initialization failed: [/build/gloo/x.cc:54] [/build/x.cc:54] Wait timeout after 5 seconds"


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.delenv("HOROVOD_START_REPORT", raising=False)


def horovod(init) -> SimpleNamespace:
    """A binding whose ``init`` is given, with one worker."""
    one = {name: lambda: 1 for name in ("size", "local_size")}
    zero = {name: lambda: 0 for name in ("rank", "local_rank")}
    return SimpleNamespace(init=init, mpi_enabled=lambda: False, **one, **zero)


def test_what_gloo_throws_is_an_error_of_the_environment():
    def fails() -> None:
        raise ValueError(GLOO)

    with pytest.raises(EnvironmentFault) as caught:
        start_horovod(horovod(fails), None)
    assert caught.value.problem.endswith("Horovod initialization failed: Wait timeout after 5 seconds")
    assert "--start-timeout" in caught.value.remedy


def test_a_worker_that_never_arrives_ends_the_process(monkeypatch, capsys):
    codes, left = [], threading.Event()
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "0.1")
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), left.set()))
    monkeypatch.setattr(workers.start_reports, "stopped_workers", lambda: ["rank 2 (process 42)"])
    monkeypatch.setattr(workers, "HorovodWorkers", lambda hvd, *of_job: hvd)
    start_horovod(horovod(lambda: left.wait(10)), None)
    assert codes == [3]
    said = capsys.readouterr().err
    assert said.startswith("hvdtrain: rank 0 on ")
    assert "not all of the 4 workers started Horovod within 0.1 s; stopped on this host: rank 2" in said


@pytest.mark.parametrize("given", ["soon", "0", "nan", "1e9"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(given):
    with pytest.raises(UsageError, match="HOROVOD_START_TIMEOUT must be a number of seconds between 0 and"):
        start_limit({"HOROVOD_START_TIMEOUT": given})


@pytest.mark.parametrize(
    ("job", "rank"),
    [("HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RANK"), ("PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK")],
)
def test_a_stopped_worker_of_this_job_is_found(job, rank):
    processes = []
    for name, number in (("this", "3"), ("other", "4"), ("this", "5")):
        environ = {**os.environ, job: name, rank: number}
        command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
        processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE))
    try:
        for process in processes:
            process.stdout.readline()
        for process in processes[:2]:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
        assert stopped_workers({job: "this"}) == [f"rank 3 (process {processes[0].pid})"]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_library_gets_the_reason_or_is_an_error_before_training(framework, monkeypatch):
    reasons: list[bytes] = []
    basics = SimpleNamespace(MPI_LIB_CTYPES=SimpleNamespace(horovod_abort=reasons.append))
    for other in ("torch", "tensorflow"):
        monkeypatch.delitem(sys.modules, f"horovod.{other}.mpi_ops", raising=False)
    monkeypatch.setitem(sys.modules, f"horovod.{framework}.mpi_ops", SimpleNamespace(_basics=basics))
    abort_collectives("rank 2 on h\udc80st was killed")
    abort_collectives("x" * 5000)
    assert reasons == [b"rank 2 on h?st was killed", b"x" * 400]
    del basics.MPI_LIB_CTYPES.horovod_abort
    for call in (lambda: abort_collectives("x"), lambda: start_horovod(None, None, SimpleNamespace())):
        with pytest.raises(HorovodBuildError, match="cannot give up collectives"):
            call()
