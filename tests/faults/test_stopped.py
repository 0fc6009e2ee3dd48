"""A worker is killed, or the user presses Ctrl-C: everything ends soon, and something says so."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from endings import SOON_SECONDS, Ending, command_for, ended, steps_logged, wait_until
from support.jobs import started

from hvdtrain.errors import Interrupted
from hvdtrain.jobs.failures import interruptible

IN_TERMINAL = [sys.executable, str(Path(__file__).with_name("in_terminal.py"))]


def stopped(command: list[str], cwd: Path, stop: Callable[[started], None]) -> tuple[Ending, float]:
    """Start a slow job, stop it while it trains, and give its ending and the seconds it took to end."""
    with started(command, cwd) as job:
        wait_until(lambda: steps_logged(cwd) >= 3)
        begun = time.time()
        stop(job)
        ending = ended(job, cwd)
    return ending, ending.ended - begun


def slow(framework: str, controller: str) -> list[str]:
    return command_for(1 if controller == "none" else 2, controller, "Slow", "--framework", framework)


KILLED = [("torch", "mpi"), ("torch", "gloo")]


@pytest.fixture(scope="module", params=KILLED, ids="-".join)
def killed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")

    def kill(_: started) -> None:
        os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)

    return stopped(slow(*request.param), folder, kill)


def test_a_killed_worker_ends_the_job_soon(killed):
    assert killed[1] < SOON_SECONDS


def test_a_killed_worker_is_a_failure(killed):
    assert killed[0].returncode == 128 + signal.SIGKILL


def test_the_launcher_says_which_worker_was_killed(killed):
    assert re.search(r"rank 1[^.]*\ssignal\s9|worker 1 .*exit code 137", killed[0].output)


def test_nothing_else_looks_like_a_cause(killed):
    assert "Traceback" not in killed[0].output
    assert "bug in hvdtrain" not in killed[0].output


def test_a_run_whose_worker_was_killed_is_not_reported_as_completed(killed):
    path = killed[0].folder / "run" / "summary.json"
    assert not path.exists() or killed[0].summary["status"] != "completed"


# It kills its workers 0.3 s after it has sent them SIGTERM, which may be too soon on a busy machine
TRIES_OF_MPIRUN = 5
INTERRUPTED = [("torch", "none"), ("torch", "mpirun"), ("tf", "gloo")]


@pytest.fixture(scope="module", params=INTERRUPTED, ids="-".join)
def interrupted(request, tmp_path_factory):
    def press_ctrl_c(job: started) -> None:
        os.kill(job.process.pid, signal.SIGUSR1)

    command = [*IN_TERMINAL, *slow(*request.param)]
    tries = 1 if request.param[1] != "mpirun" else TRIES_OF_MPIRUN
    for _ in range(tries):
        folder = tmp_path_factory.mktemp("job")
        found = stopped(command, folder, press_ctrl_c)
        if (folder / "run" / "summary.json").exists() and " at step " in found[0].output:
            break
    return found


def test_ctrl_c_ends_all_workers_soon(interrupted):
    assert interrupted[1] < SOON_SECONDS


@pytest.fixture
def is_plain_mpirun(request):
    """Whether mpirun gets Ctrl-C itself: it sends its workers SIGTERM, and gives them 0.3 s to stop."""
    return request.node.callspec.params["interrupted"][1] == "mpirun"


def test_the_exit_code_after_ctrl_c_is_130(interrupted, is_plain_mpirun):
    assert interrupted[0].returncode == (1 if is_plain_mpirun else 130)


def test_ctrl_c_says_once_where_training_stood(interrupted, is_plain_mpirun):
    why = "(?:interrupted by SIGTERM|SIGTERM came)" if is_plain_mpirun else "interrupted by SIGINT"
    place = r"at step ([\d,]+) of 100,000 \(epoch [\d.]+\), run directory run"
    said = re.findall(f"{why} {place}", interrupted[0].output)
    assert len(said) == 1
    assert int(said[0].replace(",", "")) >= 3


def test_ctrl_c_shows_no_traceback(interrupted):
    assert "Traceback" not in interrupted[0].output


def test_ctrl_c_leaves_a_summary(interrupted):
    assert interrupted[0].summary["status"] == "stopped"


def test_an_error_that_a_signal_sets_off_counts_as_the_signal():
    # as TensorFlow's native code does: seen with Ctrl-C in a collective
    def interrupted_natively():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Interrupted:
            raise RuntimeError("MISMATCH of original and normalized active exception types") from None

    with pytest.raises(Interrupted) as caught, interruptible() as signals, signals.signals_take_precedence():
        interrupted_natively()
    assert caught.value.signal_number == signal.SIGTERM
