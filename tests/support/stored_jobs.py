"""Jobs whose run directory lies in an object store, and what a plain client finds there."""

import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.checkpoints.storage import MANIFEST_FILE, MODEL_FILE, OPTIMIZER_FILE, checkpoints_in
from hvdtrain.checkpoints.verification import verify
from support import resuming
from support.jobs import Result, launcher, started, temporary_folder
from support.object_store import ObjectStore
from support.stored_tasks import PACE, PACE_FILE, REACHED_FILE, STEP_SECONDS

TASKS = Path(__file__).with_name("stored_tasks.py")
TESTS = TASKS.parents[1]
CLAIM = "hvdtrain.claim"
PATIENCE_SECONDS = 300.0
_MANIFEST = re.compile(rf"checkpoints/step-(\d+)/{re.escape(MANIFEST_FILE)}")
_LOOKS = 3  # at a checkpoint that is replaced or deleted meanwhile
# what a clock decides
_NOT_REPEATED = {
    "seconds",
    "samples_per_second",
    "data_wait_fraction",
    "slowest_rank",
    "wait_fraction",
    "peak_memory_mib",
}


@dataclass(frozen=True)
class Saved:
    """What a checkpoint that verifies holds.

    Args:
        step, samples: how far training was.
        arrays: the SHA-256 of the files of arrays, by name.
    """

    step: int
    samples: int
    arrays: dict[str, str]

    @classmethod
    def at(cls, folder: Path) -> "Saved":
        """Return what a folder holds.

        Raises:
            CorruptCheckpoint: If it does not verify.
        """
        manifest = verify(folder).manifest
        arrays = {name: manifest.files[name].sha256 for name in (MODEL_FILE, OPTIMIZER_FILE)}
        return cls(manifest.step, manifest.samples, arrays)


def saved_in(run_dir: Path) -> dict[int, Saved]:
    """Return the checkpoints of a local run, by step."""
    found = [Saved.at(path) for path in checkpoints_in(run_dir / "checkpoints")]
    return {saved.step: saved for saved in found}


class Bucket:
    """The bucket of a store as a plain client sees it, past the faults.

    Args:
        store: the store.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._client, self._name = store.server.client(), store.bucket
        self._seen: dict[tuple[object, ...], Saved] = {}

    def objects(self, prefix: str) -> dict[str, str]:
        """Return the tags of all objects below a prefix, by their names there."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix=f"{prefix}/")
        found = [entry for page in pages for entry in page.get("Contents", [])]
        return {entry["Key"].removeprefix(f"{prefix}/"): entry["ETag"] for entry in found}

    def read(self, key: str) -> bytes:
        """Return an object's content; nothing if there is none."""
        try:
            return self._client.get_object(Bucket=self._name, Key=key)["Body"].read()
        except self._client.exceptions.NoSuchKey:
            return b""

    def write(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=self._name, Key=key, Body=content)

    def remove(self, key: str) -> None:
        self._client.delete_object(Bucket=self._name, Key=key)

    def metrics(self, prefix: str) -> list[dict]:
        """Return the lines of a run's log."""
        return metrics_in(self.read(f"{prefix}/metrics.jsonl"))

    def summary(self, prefix: str) -> dict:
        return json.loads(self.read(f"{prefix}/summary.json"))

    def saved(self, prefix: str) -> dict[int, Saved]:
        """Return the checkpoints of a run that have a manifest, by step.

        Raises:
            AssertionError: If one does not verify.
        """
        names = self.objects(prefix)
        steps = sorted(int(match[1]) for name in names if (match := _MANIFEST.fullmatch(name)))
        looked = {step: self._saved(f"{prefix}/checkpoints/step-{step:08d}") for step in steps}
        return {step: saved for step, saved in looked.items() if saved is not None}

    def _saved(self, prefix: str) -> Saved | None:
        for _ in range(_LOOKS):
            files = self.objects(prefix)
            if MANIFEST_FILE not in files:
                return None  # deleted meanwhile
            state = (prefix, *sorted(files.items()))
            try:
                if state not in self._seen:
                    self._seen[state] = self._fetched(prefix, files)
                return self._seen[state]
            except CorruptCheckpoint as error:
                corruption = error
        if MANIFEST_FILE not in self.objects(prefix):
            return None
        raise AssertionError(f"{prefix} has a manifest, but {corruption}: {sorted(files)}")

    def _fetched(self, prefix: str, names: Iterable[str]) -> Saved:
        folder = temporary_folder() / prefix.rpartition("/")[2]
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(self.read(f"{prefix}/{name}"))
        return Saved.at(folder)


def metrics_in(content: bytes) -> list[dict]:
    """Return the lines of a log."""
    return [json.loads(line) for line in content.splitlines()]


def logged(metrics: list[dict]) -> list[dict]:
    """Return all that a run has logged, but what depends on the clock."""
    return [{name: value for name, value in line.items() if name not in _NOT_REPEATED} for line in metrics]


def command_for(
    workers: int, controller: str, framework: str, task: str, *options: str, run_dir: str
) -> list[str]:
    """Return the command that trains one of the tasks of stored_tasks.py."""
    words = ["--framework", framework, "--task", f"{TASKS}:{task}", "--run-dir", run_dir, *options]
    return [*launcher(workers, controller), "python", "-m", "hvdtrain", *words]


class Host:
    """A host that has nothing of others: a folder and a cache of its own.

    Args:
        environ: what names the store; nothing if there is none.
    """

    def __init__(self, environ: Mapping[str, str] = MappingProxyType({})) -> None:
        self.folder = temporary_folder()
        self._pace = self.folder / PACE_FILE
        self._environ = {
            **environ,
            "HVDTRAIN_CACHE": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{TESTS}:{TESTS.parent}",
            PACE: str(self.folder),
        }

    def start(self, command: list[str], step_seconds: float = 0.0, **changes: str) -> started:
        """Start a command."""
        changes = {**self._environ, STEP_SECONDS: str(step_seconds), **changes}
        return started(command, self.folder, **changes)

    def run(
        self, command: list[str], returncode: int = 0, timeout: float = PATIENCE_SECONDS, **changes: str
    ) -> Result:
        """Run a command to its end."""
        with self.start(command, **changes) as job:
            return ended(job, returncode, timeout)

    def hold_at(self, step: int) -> None:
        """Have training wait when a step has been done, from now on."""
        new = self._pace.with_suffix(".new")
        new.write_text(str(step))
        new.rename(self._pace)

    def release(self) -> None:
        """Let training go on."""
        self._pace.unlink(missing_ok=True)

    def reached(self) -> int:
        """Return the step after which training waits, or waited last."""
        path = self.folder / REACHED_FILE
        return int(path.read_text()) if path.exists() else 0


def ended(job: started, returncode: int = 0, timeout: float = PATIENCE_SECONDS) -> Result:
    """Wait for the end of a job, which is to be with that exit code."""
    result = job.wait(timeout)
    assert result.returncode == returncode, f"ended with {result.returncode}:\n{result.output[-5000:]}"
    return result


def until_gone(job: started) -> Result:
    """Wait until the last process of a job is gone, which may come after the launcher's end."""
    result, until = job.wait(PATIENCE_SECONDS), time.monotonic() + PATIENCE_SECONDS
    while job.pids() and time.monotonic() < until:
        time.sleep(0.05)
    return result


def rank_zero(job: started) -> list[int]:
    """Return the processes of a job's rank 0: the worker, then those that it started."""
    for pid in job.pids():
        try:
            process = psutil.Process(pid)
            environ, words = process.environ(), process.cmdline()
            is_worker = "hvdtrain" in words and "python" in Path(words[0]).name
            if is_worker and "0" in (environ.get("HOROVOD_RANK"), environ.get("OMPI_COMM_WORLD_RANK")):
                return [pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.Error:
            continue
    raise AssertionError(f"no rank 0 runs:\n{job.result().output[-3000:]}")


def await_in(job: started, condition: Callable[[], object], timeout: float = PATIENCE_SECONDS) -> None:
    """Wait for what a job is about to do, as ``resuming.await_in`` does."""
    resuming.await_in(job, lambda: bool(condition()), timeout)


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes at once: they are stopped first, so that none sees another one end."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def in_one_line(result: Result) -> str:
    """Return what a job has printed."""
    return " ".join(result.output.split())


def resumed_from(result: Result) -> int:
    """Return the step that a job says it starts from."""
    found = re.search(r"starts from \S+: step ([\d,]+),", in_one_line(result))
    assert found, f"it says nothing of resuming:\n{result.output}"
    return int(found[1].replace(",", ""))


def await_saved(
    job: started, bucket: Bucket, prefix: str, condition: Callable[[dict[int, Saved]], bool]
) -> dict[int, Saved]:
    """Wait until the whole checkpoints in a bucket are as they should be; return them."""
    found: list[dict[int, Saved]] = []

    def is_there() -> bool:
        found[:] = [bucket.saved(prefix)]
        return condition(found[0])

    await_in(job, is_there)
    return found[0]


STEPS, LONG = 30, 40  # of jobs with PyTorch and one worker


def train(*options: str, run_dir: str, steps: int = STEPS) -> list[str]:
    """Return the command that trains with PyTorch and one worker, and saves every 5 steps."""
    return command_for(1, "none", "torch", "Stored", "--steps", str(steps), *options, run_dir=run_dir)


@dataclass(frozen=True)
class Local:
    """An uninterrupted run on a disk.

    Args:
        saved: its checkpoints, by step.
        metrics: the lines of its log.
    """

    saved: dict[int, Saved]
    metrics: list[dict]

    def has_all(self, saved: dict[int, Saved]) -> bool:
        """Whether each of some checkpoints is this run's."""
        return all(self.saved[step] == one for step, one in saved.items())

    def logged(self, steps: int) -> list[dict]:
        """Return the first steps in the log, but not the evaluation after the last, which a job adds."""
        lines = [line for line in logged(self.metrics) if line["step"] <= steps]
        return [line for line in lines if line["phase"] == "train" or line["step"] < steps]


def local(command: list[str], **changes: str) -> Local:
    """Train on a disk; the command names the run directory "run"."""
    host = Host()
    host.run([*command, "--set", "keep_last=null"], **changes)
    return Local(saved_in(host.folder / "run"), metrics_in((host.folder / "run/metrics.jsonl").read_bytes()))


@functools.cache
def reference() -> Local:
    return local(train(run_dir="run", steps=LONG))


def trained(metrics: list[dict], steps: int) -> list[dict]:
    """Return what a job logged, as ``Local.logged`` does."""
    return Local({}, metrics).logged(steps)
