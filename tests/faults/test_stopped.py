"""A worker is killed, or the user presses Ctrl-C: everything ends soon, and something says so."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from endings import SOON_SECONDS, ended, signalled, slow
from support.jobs import started

from hvdtrain.errors import Interrupted
from hvdtrain.jobs.failures import interruptible

IN_TERMINAL = [sys.executable, str(Path(__file__).with_name("in_terminal.py"))]


@pytest.mark.parametrize(("framework", "controller"), [("torch", "mpi"), ("torch", "gloo")])
def test_a_killed_worker_ends_the_job_soon_and_is_named(framework, controller, tmp_path):
    ending = signalled(slow(framework, controller), tmp_path, signal.SIGKILL, rank=1)
    assert ending.seconds < SOON_SECONDS
    assert ending.returncode == 128 + signal.SIGKILL
    assert re.search(r"rank 1[^.]*\ssignal\s9|worker 1 .*exit code 137", ending.output)
    assert "Traceback" not in ending.output
    assert "bug in hvdtrain" not in ending.output
    path = tmp_path / "run" / "summary.json"
    assert not path.exists() or ending.summary["status"] != "completed"


# It kills its workers 0.3 s after it has sent them SIGTERM, which may be too soon on a busy machine
TRIES_OF_MPIRUN = 5


@pytest.mark.parametrize(
    ("framework", "controller"), [("torch", "none"), ("torch", "mpirun"), ("tf", "gloo")]
)
def test_ctrl_c_ends_all_workers_soon_and_says_once_where_training_stood(
    framework, controller, tmp_path_factory
):
    is_mpirun = controller == "mpirun"  # which gets Ctrl-C itself, and sends its workers SIGTERM
    for _ in range(TRIES_OF_MPIRUN if is_mpirun else 1):
        folder = tmp_path_factory.mktemp("job")
        ending = signalled([*IN_TERMINAL, *slow(framework, controller)], folder, signal.SIGUSR1)
        if (folder / "run" / "summary.json").exists() and " at step " in ending.output:
            break
    assert ending.seconds < SOON_SECONDS
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


LAUNCHES = """
import time
import hvdtrain

def work():
    print("WORKING", flush=True)
    time.sleep(1000)

try:
    hvdtrain.launch(work, controller="{controller}")
except KeyboardInterrupt:
    print("INTERRUPTED")
"""


@pytest.mark.parametrize(("controller", "number"), [("gloo", signal.SIGINT), ("mpi", signal.SIGKILL)])
def test_workers_that_a_script_launches_end_with_it(controller, number, tmp_path):
    (tmp_path / "job.py").write_text(LAUNCHES.format(controller=controller))
    with started(["python", "job.py"], tmp_path) as job:
        job.until(lambda: job.result().stdout.count("WORKING") == 2)
        os.kill(job.process.pid, number)
        result = ended(job, tmp_path)
    assert number == signal.SIGKILL or (result.returncode, "INTERRUPTED" in result.output) == (0, True)
