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


class Job:
    """An elastic job in a process of its own."""

    def __init__(self, folder, words, **changes):
        self._folder = folder
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        environ.update({"PYTHONPATH": str(ROOT), "HOROVOD_GRACEFUL_TERMINATION_SECONDS": "5", **changes})
        self.process = subprocess.Popen(
            words, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait_for(self, count, generation=1):
        """Wait until this number of workers are in a world; return their process ids by name."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            worlds = {file.stem: file.read_text().split() for file in self._folder.glob("*.world")}
            there = {name: int(world[3]) for name, world in worlds.items() if world[:1] == [str(generation)]}
            if len(there) == count:
                return there
            time.sleep(0.05)
        raise AssertionError(self.end(signal.SIGKILL))

    def end(self, number=None):
        """Return the exit code and the output, after a signal if one is given."""
        if number is not None:
            self.process.send_signal(number)
        try:
            output, _ = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, output

    def environments(self):
        return {file.stem: json.loads(file.read_text()) for file in self._folder.glob("*.json")}


def horovodrun(folder, *options, worker=(), **changes):
    command = [sys.executable, str(WORKER), str(folder), *worker]
    return Job(folder, [str(HOROVODRUN), *options, *command], **changes)


def test_a_job_on_one_host_runs_to_its_end(tmp_path):
    job = horovodrun(tmp_path, "-np", "2", "--min-np", "1", "--cycle-time-ms", "3")
    code, output = job.end()
    assert code == 0, output
    found = job.environments()
    assert len(found) == 2
    for name, environ in found.items():
        assert environ["HVDTRAIN_WORKER"] == name
        assert environ["HVDTRAIN_ELASTIC"].startswith("127.0.0.1:")
        assert environ["HOROVOD_CYCLE_TIME"] == "3.0"
        assert len(environ["HOROVOD_RENDEZVOUS_KEY"]) == 64
    assert {environ["HVDTRAIN_SLOT"] for environ in found.values()} == {"0", "1"}


def test_a_killed_worker_leaves_the_job_to_the_others_and_is_replaced(tmp_path):
    job = horovodrun(
        tmp_path, "-np", "2", "--min-np", "1", "--output-filename", str(tmp_path / "out"), worker=["wait"]
    )
    first = job.wait_for(2)
    killed = min(first)
    os.kill(first[killed], signal.SIGKILL)
    job.wait_for(1, generation=2)
    job.wait_for(2, generation=3)  # the other one, and the worker that took the slot
    code, output = job.end(signal.SIGTERM)
    assert code == 75, output
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        f"rank.{one}" for one in job.environments()
    }
    assert len(job.environments()) == 3


def test_workers_start_where_the_script_says(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    job = horovodrun(
        tmp_path, "-np", "1", "--max-np", "2", "--host-discovery-script", f"cat {hosts}", worker=["wait"]
    )
    job.wait_for(1)
    hosts.write_text("localhost\nlocalhost:2\n")
    job.wait_for(2, generation=2)
    code, output = job.end(signal.SIGTERM)
    assert code == 75, output


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["-np", "2", "--min-np", "3"], 2, "--min-np 3 is greater than -np 2"),
        (["-np", "2", "--slots-per-host", "0"], 2, "--slots-per-host 0"),
        (["-np", "2", "--reset-limit", "-1"], 2, "--reset-limit -1"),
        (["-np", "2", "--network-interfaces", "none7"], 2, "this host has no none7"),
        (
            ["-np", "2", "--host-discovery-script", "exit 4"],
            3,
            "To check it: python -m hvdtrain doctor --host-discovery-script 'exit 4'",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_words(tmp_path, options, code, words):
    elastic_options = (
        [] if "--min-np" in options or "--host-discovery-script" in options else ["--min-np", "1"]
    )
    found, output = horovodrun(tmp_path, *options, *elastic_options).end()
    assert (found, words in output) == (code, True), output
    assert "Traceback" not in output
    assert not list(tmp_path.glob("*.json"))


def test_ctrl_c_before_the_driver_runs_ends_the_launcher_in_one_line(tmp_path):
    options = ["-np", "1", "--host-discovery-script", "touch asked; sleep 30"]
    job = horovodrun(tmp_path, *options)
    until = time.monotonic() + SECONDS
    while not (tmp_path / "asked").exists() and time.monotonic() < until:
        time.sleep(0.05)
    code, output = job.end(signal.SIGINT)
    assert (code, output) == (130, "horovodrun: the job was ended by SIGINT before training began\n")


def test_a_command_that_is_not_found_is_named(tmp_path):
    command = ["horovodrun", "-np", "1", "--min-np", "1", "no-such-command"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert result.returncode == 127
    assert (
        "on localhost, `no-such-command` ended with exit code 127: the command was not found" in result.stderr
    )
    assert "hvd.elastic" not in result.stderr
