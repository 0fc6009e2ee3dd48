"""How Horovod's patched launcher passes signals on, ends its workers, and knows who has arrived or ended."""

import contextlib
import multiprocessing
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from hvdtrain.host import start_reports
from hvdtrain.host.start_reports import report_begin, report_end, reported_start

TELLS = """
import os, signal, sys, time
def tell(number, _):
    os.write(1, signal.Signals(number).name.encode() + b"\\n")  # print may be under way
    if number != signal.SIGUSR1:
        sys.exit(75)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, tell)
print("up", flush=True)
while True:
    time.sleep(0.05)  # a sleep may miss a signal that comes just before it
"""


RUNS_MPIRUN = """
import ctypes, sys
sys.path.insert(0, {source!r})
from horovod.runner import mpi_run
mpi_run.safe_shell_exec.GRACEFUL_TERMINATION_TIME_S = {grace}
if {without_prctl}:
    ctypes.CDLL = lambda name: object()
sys.exit(mpi_run._run_and_pass_signals_on({command!r}, None))
"""
STAYS = """
import os, signal, sys, time
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: os.write(1, signal.Signals(number).name.encode() + b"\\n"))
print(os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def horovodrun(patched, tmp_path):
    """Starts the part of horovodrun that runs mpirun, here another script; gives both processes."""
    found = []

    def start(script: str, grace: float = 30, without_prctl: bool = False):
        (tmp_path / "mpirun.py").write_text(script)
        command = f"{sys.executable} {tmp_path / 'mpirun.py'}"
        text = RUNS_MPIRUN.format(
            source=str(patched), grace=grace, without_prctl=without_prctl, command=command
        )
        (tmp_path / "horovodrun.py").write_text(text)
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "horovodrun.py")],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        line = process.stdout.readline()
        mpirun = psutil.Process(int(line)) if line.strip().isdecimal() else None
        found.append((process, mpirun))
        return process, mpirun

    yield start
    for process, mpirun in found:
        for left in (process, mpirun):
            if left is not None:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    left.kill()
        process.wait()
        process.stdout.close()


MPIRUN = TELLS.replace('print("up"', "print(os.getpid()")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2], ids=lambda n: n.name)
def test_a_request_to_stop_reaches_mpirun_as_sigusr2_and_its_exit_code_is_kept(horovodrun, number):
    process, _ = horovodrun(MPIRUN)
    process.send_signal(number)
    assert process.stdout.readline() == "SIGUSR2\n"
    assert process.wait(timeout=120) == 75


def test_an_mpirun_that_does_not_end_in_time_gets_sigterm(horovodrun):
    process, _ = horovodrun(STAYS, grace=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGUSR2\n"
    assert process.wait(timeout=120) == 128 + signal.SIGTERM


# as mpirun does, it starts its worker in a group of its own and without a mask, and tells its exit code
MPIRUN_WITH_WORKER = """
import os, signal, subprocess, sys
def prepare():
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
command = [sys.executable, "-c", {worker!r}]
environ = {{**os.environ, "OMPI_COMM_WORLD_RANK": "0"}}
worker = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, preexec_fn=prepare)
worker.stdout.readline()
print(os.getpid(), flush=True)
for line in worker.stdout:
    print(line, end="", flush=True)
sys.exit(worker.wait())
"""


@pytest.mark.parametrize(
    ("number", "received", "mpiruns", "code"),
    [
        (signal.SIGTERM, "SIGTERM", "worker.wait()", 75),
        (signal.SIGHUP, "SIGTERM", "worker.wait()", 75),
        (signal.SIGINT, "SIGINT", "worker.wait()", 75),
        (signal.SIGINT, "SIGINT", "1", 128 + signal.SIGINT),  # Ctrl-C, whatever mpirun makes of it
    ],
)
def test_workers_on_this_host_receive_the_signal_themselves(horovodrun, number, received, mpiruns, code):
    mpirun = MPIRUN_WITH_WORKER.format(worker=TELLS).replace("worker.wait()", mpiruns)
    process, _ = horovodrun(mpirun)
    process.send_signal(number)
    assert process.stdout.readline() == f"{received}\n"
    assert process.wait(timeout=120) == code


def test_an_mpirun_whose_horovodrun_is_killed_ends_without_prctl_too(horovodrun):
    process, mpirun = horovodrun(STAYS, without_prctl=True)
    deadline = time.monotonic() + 0.5  # until horovodrun does nothing but wait for mpirun
    while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING or time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    assert not psutil.wait_procs([mpirun], timeout=120)[1]


SLOTS = [
    SimpleNamespace(hostname=host, local_rank=slot)
    for host, slot in (("h1", 0), ("h1", 1), ("h2", 0), ("h2", 1))
]


@pytest.fixture
def driver_service(horovod):
    """The part of the launcher that follows a start."""
    return horovod("horovod.runner.driver.driver_service")


def wait_for(reports, expected) -> None:
    deadline = time.monotonic() + 60
    while (found := reports.arrived()) != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def test_workers_report_their_start_to_the_launcher(driver_service):
    reports = driver_service.StartReports("127.0.0.1")
    environ = {"HOROVOD_START_REPORT": reports.variable}
    assert reports.arrived() == set()
    with contextlib.suppress(ValueError), reported_start(3, environ):
        wait_for(reports, {3})
        raise ValueError
    with reported_start(1, environ):
        wait_for(reports, {1, 3})
    wait_for(reports, None)
    reports.close()


@pytest.mark.parametrize(
    ("ends", "exit_code", "judged"),
    [
        ((None, None), 0, 0),  # both with Python
        ((4, "lost"), 4, 4),  # a worker's own
        ((3, "lost"), 1, 3),  # mpirun's own
        ((None, "lost"), 0, 3),
        (("lost", "lost"), 14, 3),
        (("lost", "lost"), 130, 130),  # a signal
    ],
)
def test_a_job_has_succeeded_if_each_worker_that_began_has_ended_by_itself(
    driver_service, capsys, ends, exit_code, judged
):
    reports = driver_service.StartReports("127.0.0.1")
    for rank, code in enumerate(ends):
        report_begin(rank, {"HOROVOD_START_REPORT": reports.variable})
        if code == "lost":
            start_reports._begun.clear()
        else:
            report_end(code)
    deadline = time.monotonic() + 60
    while len(reports._ended) < len(ends):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert reports.judge(exit_code, SLOTS[1:3]) == judged
    said = capsys.readouterr().err
    reports.close()
    assert ("rank 1 (host h2, slot 0) ended before the job was done" in said) == (judged != exit_code)


def test_a_forked_process_of_multiprocessing_reports_its_end(driver_service):
    reports = driver_service.StartReports("127.0.0.1")
    environ = {"HOROVOD_START_REPORT": reports.variable}
    process = multiprocessing.get_context("fork").Process(target=report_begin, args=(0, environ))
    process.start()
    process.join(60)
    assert (process.exitcode, reports.judge(0, SLOTS[:1])) == (0, 0)
    reports.close()
