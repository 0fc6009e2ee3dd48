"""Jobs whose run directory lies in an object store: killed, stopped, with a store that fails or is full."""

import functools
import json
import os
import re
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support import resuming, stored_tasks
from support.documents import ROOT
from support.jobs import LIMIT_SECONDS, Result, Run, launcher, started, temporary_folder
from support.object_store import ObjectStore
from support.stored_tasks import DATA, PACE, PACE_FILE, PARTS, REACHED_FILE
from support.stream_files import write_samples

from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.checkpoints.storage import MANIFEST_FILE, checkpoints_in, verify

pytest.importorskip("pyarrow")

TASKS = Path(stored_tasks.__file__)
CLAIM = "hvdtrain.claim"
STEPS, LONG = 30, 40  # of jobs with PyTorch and one worker
_LOOKS = 3  # at a checkpoint that is replaced or deleted meanwhile

Saved = dict[int, dict[str, str]]  # the SHA-256 of the arrays of checkpoints that verify, by step


def saved_in(folder: Path) -> Saved:
    """Return the checkpoints in a folder; raise CorruptCheckpoint if one does not verify."""
    manifests = [verify(path).manifest for path in checkpoints_in(folder)]
    return {
        one.step: {name: file.sha256 for name, file in one.files.items() if name.endswith(".safetensors")}
        for one in manifests
    }


def saved_at(store: ObjectStore, prefix: str) -> Saved:
    """Return the checkpoints of a run in a store that have a manifest; fail if one does not verify."""
    for look in range(_LOOKS):
        objects = store.objects(f"{prefix}/checkpoints/")
        whole = {key.rpartition("/")[0] for key in objects if key.endswith(f"/{MANIFEST_FILE}")}
        with tempfile.TemporaryDirectory() as name, suppress(*([CorruptCheckpoint] * (look < _LOOKS - 1))):
            for key, content in objects.items():
                if key.rpartition("/")[0] in whole:
                    path = Path(name, *key.split("/")[-2:])
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(content)
            return saved_in(Path(name))
    raise AssertionError


def metrics_at(store: ObjectStore, prefix: str) -> list[dict]:
    """Return the lines of a run's log in a store, but what depends on the clock."""
    content = store.objects(f"{prefix}/metrics.jsonl")[f"{prefix}/metrics.jsonl"]
    return resuming.repeated(map(json.loads, content.splitlines()))


def summary_at(store: ObjectStore, prefix: str) -> dict:
    return json.loads(store.objects(f"{prefix}/summary.json")[f"{prefix}/summary.json"])


def command_for(
    workers: int, controller: str, framework: str, task: str, *options: str, run_dir: str
) -> list[str]:
    """Return the command that trains one of the tasks of stored_tasks.py."""
    words = ["--framework", framework, "--task", f"{TASKS}:{task}", "--run-dir", run_dir, *options]
    return [*launcher(workers, controller), "python", "-m", "hvdtrain", *words]


def train(*options: str, run_dir: str, steps: int = STEPS) -> list[str]:
    """Return the command that trains with PyTorch and one worker, and saves every 5 steps."""
    return command_for(1, "none", "torch", "Stored", "--steps", str(steps), *options, run_dir=run_dir)


class Host:
    """A host that has nothing of others: a folder and a cache of its own, and what names the store."""

    def __init__(self, **environ: str) -> None:
        self.folder = temporary_folder()
        self._pace = self.folder / PACE_FILE
        self._environ = {
            **environ,
            "HVDTRAIN_CACHE": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}",
            PACE: str(self.folder),
        }

    def start(self, command: list[str], **changes: str) -> started:
        return started(command, self.folder, **{**self._environ, **changes})

    def run(self, command: list[str], returncode: int = 0, **changes: str) -> Result:
        """Run a command to its end."""
        with self.start(command, **changes) as job:
            return ended(job, returncode)

    def hold_at(self, step: int) -> None:
        """Have training wait when a step has been done, from now on."""
        new = self._pace.with_suffix(".new")
        new.write_text(str(step))
        new.rename(self._pace)

    def release(self) -> None:
        self._pace.unlink(missing_ok=True)

    def reached(self) -> int:
        """Return the step after which training waits, or waited last."""
        path = self.folder / REACHED_FILE
        return int(path.read_text()) if path.exists() else 0


def ended(job: started, returncode: int = 0, timeout: float = LIMIT_SECONDS) -> Result:
    """Wait for the end of a job, which is to be with that exit code."""
    result = job.wait(timeout)
    assert result.returncode == returncode, f"ended with {result.returncode}:\n{result.output[-5000:]}"
    return result


def kill_rank_zero(job: started) -> None:
    """Kill a job's rank 0 and all that it started; wait until the last process of the job is gone."""
    for process in map(psutil.Process, job.pids()):
        with suppress(psutil.Error):
            environ, words = process.environ(), process.cmdline()
            is_worker = "hvdtrain" in words and "python" in Path(words[0]).name
            if is_worker and "0" in (environ.get("HOROVOD_RANK"), environ.get("OMPI_COMM_WORLD_RANK")):
                pids = [process.pid, *(child.pid for child in process.children(recursive=True))]
                for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, none sees another one end
                    resuming.send(number, pids)
                break
    else:
        raise AssertionError(f"no rank 0 runs:\n{job.result().output[-3000:]}")
    result, until = job.wait(LIMIT_SECONDS), time.monotonic() + LIMIT_SECONDS
    assert result.returncode != 0
    while job.pids() and time.monotonic() < until:  # the last process may end after the launcher
        time.sleep(0.05)


def in_one_line(result: Result) -> str:
    """Return what a job has printed."""
    return " ".join(result.output.split())


@dataclass(frozen=True)
class Local:
    """An uninterrupted run on a disk: its checkpoints, and the lines of its log."""

    saved: Saved
    metrics: list[dict]

    def logged(self, steps: int) -> list[dict]:
        """Return the first steps in the log, but not the evaluation after the last, which a job adds."""
        lines = [line for line in self.metrics if line["step"] <= steps]
        return [line for line in lines if line["phase"] == "train" or line["step"] < steps]


def local(command: list[str], **changes: str) -> Local:
    """Train on a disk; the command names the run directory "run"."""
    host = Host()
    host.run([*command, "--set", "keep_last=null"], **changes)
    run = Run(host.folder / "run", None)
    return Local(saved_in(run.folder / "checkpoints"), resuming.logged(run))


@functools.cache
def reference() -> Local:
    return local(train(run_dir="run", steps=LONG))


def test_a_run_that_was_killed_is_resumed_on_another_host_from_the_store_alone(store):
    """Rank 0 is killed when the first file of a checkpoint is in the store."""
    write_samples(data := temporary_folder(), PARTS)
    store.put_folder(data, "data")

    def command(run_dir: str, *options: str) -> list[str]:
        options = ("--steps", str(STEPS), *options)
        return command_for(2, "gloo", "torch", "Parquet", *options, run_dir=run_dir)

    prefix, host = "killed", Host(**store.environ)
    expected = local(command("run"), **{DATA: str(data)})
    host.hold_at(12)
    with host.start(command(store.url(prefix)), **{DATA: store.url("data")}) as job:
        job.until(lambda: 10 in saved_at(store, prefix))
        host.hold_at(17)
        job.until(lambda: store.objects(f"{prefix}/checkpoints/step-00000015/"))
        store.proxy.is_frozen = True
        kill_rank_zero(job)
    store.proxy.heal()
    store.remove(f"{prefix}/{CLAIM}")  # in place of waiting until it is too old
    before = saved_at(store, prefix)
    assert 10 in before
    assert before.items() <= expected.saved.items()

    resumed = Host(**store.environ).run(command(store.url(prefix), "--resume"), **{DATA: store.url("data")})
    assert resuming.resumed_from(Run(host.folder / "run", resumed))[0] == max(before)
    assert metrics_at(store, prefix) == expected.metrics
    saved = saved_at(store, prefix)
    assert sorted(saved) == [20, 25, 30]
    assert saved.items() <= expected.saved.items()
    url = store.url(prefix, "checkpoints", "step-00000030")
    assert summary_at(store, prefix)["checkpoint"] == url
    assert f"checkpoint: {url}" in in_one_line(resumed)


def test_training_continues_while_the_store_is_down_and_nothing_is_lost(store):
    """It answers with errors, then slowly, then not at all, then again."""
    prefix, host, proxy = "weathered", Host(**store.environ), store.proxy
    host.hold_at(7)
    with host.start(train(run_dir=store.url(prefix))) as job:
        job.until(lambda: 5 in saved_at(store, prefix))
        proxy.failures_left = 6
        host.hold_at(12)
        job.until(lambda: 10 in saved_at(store, prefix))
        proxy.heal()
        proxy.delay_seconds = 0.1
        host.hold_at(17)
        job.until(lambda: 15 in saved_at(store, prefix))
        proxy.heal()
        proxy.is_down = True
        before = saved_at(store, prefix)
        host.hold_at(27)
        job.until(lambda: host.reached() >= 27)
        job.until(lambda: re.search(r"(?i)store|cannot be", job.result().output))
        during = saved_at(store, prefix)
        proxy.heal()
        host.release()
        result = ended(job)
    after = saved_at(store, prefix)
    assert 15 in before
    assert {**during, **before} == during
    assert sorted(after) == [20, 25, 30]
    assert all(found.items() <= reference().saved.items() for found in (before, after))
    assert Local({}, metrics_at(store, prefix)).logged(STEPS) == reference().logged(STEPS)
    assert summary_at(store, prefix)["status"] == "completed"
    assert "Traceback" not in result.output


@pytest.mark.parametrize("place", ["down", "missing"])
def test_without_a_store_a_job_does_not_begin(place, store):
    url = "s3://no-such-bucket/run" if place == "missing" else store.url("down")
    store.proxy.is_down = place == "down"
    try:
        result = Host(**store.environ).run(train(run_dir=url), returncode=3)
    finally:
        store.proxy.heal()
    assert url.rpartition("/")[0] in in_one_line(result)
    assert "Traceback" not in result.output
    assert "train step" not in in_one_line(result)


def test_a_last_state_that_is_not_in_the_store_is_no_success_and_is_uploaded_later(store):
    """SIGTERM ends the job while it waits for the store, which takes no checkpoint; then it is resumed."""
    prefix, host = "cut-off", Host(**store.environ)
    command = train("--resume", run_dir=store.url(prefix))
    host.hold_at(7)
    with host.start(command) as job:
        job.until(lambda: 5 in saved_at(store, prefix))
        store.proxy.refused = "/checkpoints/"
        host.release()
        job.until(lambda: "uploading to" in job.result().output)
        os.kill(job.process.pid, signal.SIGTERM)  # from then on it waits for 30 s in place of 60 s
        text = in_one_line(ended(job, returncode=3, timeout=50))
    store.proxy.heal()
    assert str(host.folder / "cache") in text  # the local copy
    assert "--resume" in text
    assert "QuotaExceeded" in text
    assert "Traceback" not in text
    (log,) = host.folder.glob("cache/runs/**/metrics.jsonl")
    run = Run(log.parent, None)
    assert run.summary["status"] == "unsaved"
    assert "QuotaExceeded" in run.summary["save_error"]
    assert run.summary["seconds"] < run.metrics[-1]["seconds"] + 10.0, "without the wait for the store"
    saved = saved_at(store, prefix)
    assert sorted(saved) == [5]
    assert saved.items() <= reference().saved.items()

    resumed = Run(host.folder / "run", host.run(command))
    assert resuming.resumed_from(resumed)[0] == STEPS
    saved = saved_at(store, prefix)
    assert sorted(saved) == [20, 25, 30]
    assert saved.items() <= reference().saved.items()
    assert Local({}, metrics_at(store, prefix)).logged(STEPS) == reference().logged(STEPS)
