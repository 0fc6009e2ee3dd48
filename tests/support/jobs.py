"""Running real jobs from tests: with a hard time limit, and nothing left running."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
CONTROLLERS = ("mpi", "gloo")
FRAMEWORKS = ("torch", "tf")
MARK = "HVDTRAIN_TEST_JOB"
# of a job that does not hang: imports beside other jobs may take a minute
LIMIT_SECONDS = 300
_HELPERS_SECONDS = 30  # in which a launcher's own helper processes end after it
# "[1,0]<stdout>: " of mpirun, "[0]<stdout>:" of Horovod's Gloo launcher, "[w1]<stdout>:" of an elastic job
_TAG = re.compile(r"^\[(?:1,|w)?(\d+)\]<(stdout|stderr)>: ?", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What a job left: its exit code and what it printed, launcher's tags removed.

    ``spoke`` holds the ranks other than 0 that printed anything.
    """

    returncode: int
    stdout: str
    stderr: str
    spoke: frozenset[int] = frozenset()

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def environment(**changes: str) -> dict[str, str]:
    """Return the environment for a job: this virtual environment first, one thread a process."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    environ["PATH"] = f"{BIN}{os.pathsep}{environ['PATH']}"
    if os.getuid() == 0:
        environ["OMPI_ALLOW_RUN_AS_ROOT"] = environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return {**environ, "TF_CPP_MIN_LOG_LEVEL": "3", **changes}


def launcher(workers: int, controller: str) -> list[str]:
    """Return the words before ``python``: none for one worker without a controller."""
    if controller == "none":
        assert workers == 1
        return []
    if controller == "mpirun":
        return ["mpirun", "-np", str(workers), "--bind-to", "none", "--oversubscribe"]
    if controller == "torchrun":
        return ["torchrun", "--no-python", "--nproc-per-node", str(workers)]
    return ["horovodrun", f"--{controller}", "-np", str(workers)]


def run(command: list[str], cwd: Path, timeout: float = LIMIT_SECONDS, **changes: str) -> Result:
    """Run a command to its end, or kill all of it after ``timeout`` seconds and fail."""
    with started(command, cwd, **changes) as job:
        return job.wait(timeout)


def run_suite(
    suite: Path, workers: int, controller: str, framework: str, *, cwd: Path, timeout: float, marks: str = ""
) -> None:
    """Run a file of tests inside a job: every worker runs all of them, or those with ``marks`` (as -m)."""
    pytest_command = ["python", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, str(suite)]
    result = run(
        [*launcher(workers, controller), *pytest_command],
        cwd,
        timeout=timeout,
        HVDTRAIN_TEST_FRAMEWORK=framework,
        HVDTRAIN_TESTS_REQUIRED="0",
    )
    assert result.returncode == 0, result.output[-8000:]
    assert "passed" in result.stdout


class started:  # noqa: N801 - used as a statement
    """Context with a running command; at its end none of its processes is left."""

    def __init__(self, command: list[str], cwd: Path, **changes: str) -> None:
        self._mark = uuid.uuid4().hex
        self._seen: set[int] = set()
        self.since = time.time()
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        # mpirun does not start if one that was killed left files and had the same process id
        self._mpi_files = temporary_folder()
        self._mpi_files.chmod(0o1777)  # the command may run as another user
        changes = {"PRTE_MCA_prte_local_tmpdir_base": str(self._mpi_files), **changes}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(**{MARK: self._mark, **changes}),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )
        self.command = command

    def __enter__(self) -> "started":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        deadline = time.monotonic() + (_HELPERS_SECONDS if kind is None else 0)
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        if kind is None:
            assert not left, f"{self.command} left processes running: {left}\n{self.result().output[-3000:]}"

    def kill(self) -> None:
        """Kill what is left of the job, launcher first."""
        while left := self.pids():
            for pid in sorted(left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()
        self.await_ends()
        shutil.rmtree(self._mpi_files, ignore_errors=True)

    def await_ends(self) -> None:
        """Wait until the processes that were seen are gone with all that they held, as locks of files.

        One that is ending has no environment any more, by which ``pids`` knows it, while its files are open.
        """
        deadline = time.monotonic() + _HELPERS_SECONDS
        while any(map(is_running, self._seen)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def wait(self, timeout: float) -> Result:
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.command} ran longer than {timeout} s:\n{self.result().output[-5000:]}"
            ) from None
        return self.result()

    def until(self, condition: Callable[[], object], timeout: float = LIMIT_SECONDS) -> None:
        """Wait for what the job is about to do; fail where it does not, or ends before."""
        deadline = time.monotonic() + timeout
        while not condition():
            ended = self.process.poll() is not None
            if (ended and not condition()) or time.monotonic() > deadline:
                raise AssertionError(f"the job did not get there:\n{self.result().output[-5000:]}")
            time.sleep(0.01)

    def result(self) -> Result:
        texts, spoke = [], set()
        for file in (self._out, self._err):
            file.seek(0)
            text = file.read().decode(errors="replace").replace("\r\n", "\n")
            spoke |= {int(match[1]) for match in _TAG.finditer(text)}
            texts.append(_TAG.sub("", text))
        code = self.process.returncode if self.process.returncode is not None else -1
        return Result(code, *texts, frozenset(spoke))

    def pids(self) -> list[int]:
        """Return the job's processes that still run, wherever they were re-parented to."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    ours = self._mark.encode() in (folder / "environ").read_bytes()
                    if ours and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found.append(int(folder.name))
                except OSError:
                    pass
        self._seen.update(found)
        return found


def is_running(pid: int) -> bool:
    """Whether a process runs; one that ended may wait for an init that never asks for it.

    It runs while any of its threads does, as these hold its files.
    """
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Run:
    """A finished run and the files that it wrote."""

    folder: Path
    result: Result

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics if line["phase"] == "train"]

    def difference(self, expected: "Run") -> float:
        """Return the largest relative difference of two curves; a resumed one from where it begins."""
        found, wanted = self.losses, expected.losses
        assert 0 < len(found) <= len(wanted)
        return max(abs(one / other - 1) for one, other in zip(found, wanted[-len(found) :], strict=True))


def train(
    workers: int, controller: str, *options: str, cwd: Path, timeout: float = LIMIT_SECONDS, **changes: str
) -> Run:
    """Run ``python -m hvdtrain`` to its good end, writing to a folder in ``cwd``."""
    folder = cwd / "run"
    command = [*launcher(workers, controller), "python", "-m", "hvdtrain", *options, "--run-dir", str(folder)]
    result = run(command, cwd, timeout, **changes)
    assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.output[-5000:]}"
    return Run(folder, result)


def temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=_root()))


def remove_temporary_folders() -> None:
    """Remove all temporary folders of this process."""
    if _root.cache_info().currsize:
        shutil.rmtree(_root(), ignore_errors=True)
        _root.cache_clear()


@functools.cache
def _root() -> str:
    import atexit

    root = tempfile.mkdtemp(prefix="hvdtrain-tests-")
    os.chmod(root, 0o711)  # for commands that run as another user
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
