"""An elastic job from the launcher's options to its exit code, with workers that need no framework."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("horovod.runner.gloo_run", reason="Horovod is not installed")

ROOT = Path(__file__).parents[3]
WORKER = ROOT / "tests" / "support" / "elastic_worker.py"
SECONDS = 120
HOROVODRUN = Path(sys.executable).with_name("horovodrun")


def horovodrun(folder, *options) -> subprocess.Popen:
    """Start an elastic job."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    return subprocess.Popen(
        [str(HOROVODRUN), *options, sys.executable, str(WORKER), str(folder)],
        env={**environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(job: subprocess.Popen) -> tuple[int, str]:
    """Return the exit code and the output."""
    with job:
        try:
            output, _ = job.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
    return job.returncode, output


def test_a_job_on_one_host_runs_to_its_end(tmp_path):
    code, output = end(horovodrun(tmp_path, "-np", "2", "--min-np", "1", "--cycle-time-ms", "3"))
    assert code == 0, output
    found = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert len(found) == 2
    for name, environ in found.items():
        assert environ["HVDTRAIN_WORKER"] == name
        assert environ["HVDTRAIN_ELASTIC"].startswith("127.0.0.1:")
        assert environ["HOROVOD_CYCLE_TIME"] == "3.0"
        assert len(environ["HOROVOD_RENDEZVOUS_KEY"]) == 64
    assert {environ["HVDTRAIN_SLOT"] for environ in found.values()} == {"0", "1"}


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--min-np", "1", "--slots-per-host", "0"], 2, "--slots-per-host 0"),
        (["--min-np", "1", "--reset-limit", "-1"], 2, "--reset-limit -1"),
        (["--min-np", "1", "--network-interfaces", "none7"], 2, "this host has no none7"),
        (["--host-discovery-script", "exit 4"], 3, "hvdtrain doctor --host-discovery-script 'exit 4'"),
    ],
)
def test_what_cannot_work_is_refused_in_words(tmp_path, options, code, words):
    found, output = end(horovodrun(tmp_path, "-np", "2", *options))
    assert (found, words in output) == (code, True), output
    assert "Traceback" not in output
    assert not list(tmp_path.glob("*.json"))


def test_ctrl_c_before_the_driver_runs_ends_the_launcher_in_one_line(tmp_path):
    options = ["-np", "1", "--host-discovery-script", "touch asked; sleep 30"]
    job = horovodrun(tmp_path, *options)
    until = time.monotonic() + SECONDS
    while not (tmp_path / "asked").exists() and time.monotonic() < until:
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    assert end(job) == (130, "horovodrun: the job was ended by SIGINT before training began\n")
