"""Jobs whose run directory lies in an object store, and what a plain client finds there."""

import functools
import json
import re
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.checkpoints.storage import MANIFEST_FILE, checkpoints_in, verify
from support import resuming
from support.jobs import LIMIT_SECONDS, Result, launcher, started, temporary_folder
from support.object_store import ObjectStore
from support.stored_tasks import PACE, PACE_FILE, REACHED_FILE

TASKS = Path(__file__).with_name("stored_tasks.py")
TESTS = TASKS.parents[1]
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
    """Return the lines of a run's log in a store."""
    return metrics_in(store.objects(f"{prefix}/metrics.jsonl")[f"{prefix}/metrics.jsonl"])


def summary_at(store: ObjectStore, prefix: str) -> dict:
    return json.loads(store.objects(f"{prefix}/summary.json")[f"{prefix}/summary.json"])


def metrics_in(content: bytes) -> list[dict]:
    """Return the lines of a log, but what depends on the clock."""
    return resuming.repeated(map(json.loads, content.splitlines()))


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
            "PYTHONPATH": f"{TESTS}:{TESTS.parent}",
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


def resumed_from(result: Result) -> int:
    """Return the step that a job says it starts from."""
    found = re.search(r"starts from \S+: step ([\d,]+),", in_one_line(result))
    assert found, f"it says nothing of resuming:\n{result.output}"
    return int(found[1].replace(",", ""))


@dataclass(frozen=True)
class Local:
    """An uninterrupted run on a disk: its checkpoints, and the lines of its log."""

    saved: Saved
    metrics: list[dict]

    def has_all(self, saved: Saved) -> bool:
        """Whether each of some checkpoints is this run's."""
        return all(self.saved[step] == one for step, one in saved.items())

    def logged(self, steps: int) -> list[dict]:
        """Return the first steps in the log, but not the evaluation after the last, which a job adds."""
        lines = [line for line in self.metrics if line["step"] <= steps]
        return [line for line in lines if line["phase"] == "train" or line["step"] < steps]


def local(command: list[str], **changes: str) -> Local:
    """Train on a disk; the command names the run directory "run"."""
    host = Host()
    host.run([*command, "--set", "keep_last=null"], **changes)
    folder = host.folder / "run"
    return Local(saved_in(folder / "checkpoints"), metrics_in((folder / "metrics.jsonl").read_bytes()))


@functools.cache
def reference() -> Local:
    return local(train(run_dir="run", steps=LONG))
