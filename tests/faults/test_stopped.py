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


@pytest.mark.parametrize(("framework", "controller"), KILLED)
def test_a_killed_worker_ends_the_job_soon_and_is_named(framework, controller, tmp_path):
    def kill(_: started) -> None:
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)

    ending, seconds = stopped(slow(framework, controller), tmp_path, kill)
    assert seconds < SOON_SECONDS
    assert ending.returncode == 128 + signal.SIGKILL
    assert re.search(r"rank 1[^.]*\ssignal\s9|worker 1 .*exit code 137", ending.output)
    assert "Traceback" not in ending.output
    assert "bug in hvdtrain" not in ending.output
    path = tmp_path / "run" / "summary.json"
    assert not path.exists() or ending.summary["status"] != "completed"


# It kills its workers 0.3 s after it has sent them SIGTERM, which may be too soon on a busy machine
TRIES_OF_MPIRUN = 5
INTERRUPTED = [("torch", "none"), ("torch", "mpirun"), ("tf", "gloo")]


@pytest.mark.parametrize(("framework", "controller"), INTERRUPTED)
def test_ctrl_c_ends_all_workers_soon_and_says_once_where_training_stood(
    framework, controller, tmp_path_factory
):
    def press_ctrl_c(job: started) -> None:
        os.kill(job.process.pid, signal.SIGUSR1)

    is_mpirun = controller == "mpirun"  # which gets Ctrl-C itself, and sends its workers SIGTERM
    for _ in range(TRIES_OF_MPIRUN if is_mpirun else 1):
        folder = tmp_path_factory.mktemp("job")
        ending, seconds = stopped([*IN_TERMINAL, *slow(framework, controller)], folder, press_ctrl_c)
        if (folder / "run" / "summary.json").exists() and " at step " in ending.output:
            break
    assert seconds < SOON_SECONDS
    assert ending.returncode == (1 if is_mpirun else 130)
    why = "(?:interrupted by SIGTERM|SIGTERM came)" if is_mpirun else "interrupted by SIGINT"
    place = r"at step ([\d,]+) of 100,000 \(epoch [\d.]+\), run directory run"
    (step,) = re.findall(f"{why} {place}", ending.output)
    assert int(step.replace(",", "")) >= 3
    assert "Traceback" not in ending.output
    assert ending.summary["status"] == "stopped"


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
