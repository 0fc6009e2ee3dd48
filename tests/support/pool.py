"""Pools: jobs that stay and run many cases, so that not every case pays for a launch.

A pool starts with its first case and ends with the session, or when others need its room. What a launch
itself proves (launchers, exit codes, signals, kills, hosts) has a launch of its own in jobs.py.
"""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from support.jobs import LIMIT_SECONDS, Result, Run, launcher, started, temporary_folder

WORKER = Path(__file__).with_name("pool_worker.py")
GROUPS = "+groups"
_WORKER_BYTES = 1 << 30  # what a worker keeps, at most
# of all pools together, so that most of the memory stays free
MAX_WORKERS = max(6, min(20, psutil.virtual_memory().total // 2 // _WORKER_BYTES))
_SESSION_SECONDS = 7200
_START_SECONDS = 300
_LEFT_BEHIND = "The PMIx server's listener thread failed to start"
_OTHERS_SECONDS = 3  # that the other workers have to answer when a case failed on one


@dataclass(frozen=True)
class Key:
    """What distinguishes pools.

    With GROUPS behind the controller, Horovod can sum among some of the workers, as split models do.
    """

    framework: str
    controller: str
    workers: int


@dataclass(frozen=True)
class Done:
    """A case that has run: what the function returned by rank, and what all workers wrote, rank 0 first."""

    values: list[Any]
    stdout: str
    stderr: str
    spoke: frozenset[int]


class _Worker:
    """The connection with one worker."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lines = connection, connection.makefile("r", encoding="utf-8")
        hello = self.receive()
        self.rank: int = hello["rank"]
        self.pid: int = hello["pid"]

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """Return its next message, or None if it has ended."""
        line = self._lines.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


class Pool:
    """One launch whose workers wait for cases."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.alive = True
        self._guard: subprocess.Popen[bytes] | None = None
        self._folder = temporary_folder()
        self._cases = 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            name = f"hvdtrain-pool-{uuid.uuid4().hex}"
            listener.bind(f"\0{name}")  # no file: paths of sockets must be short, temporary ones may be long
            listener.listen(key.workers)
            launched_by = launcher(key.workers, key.controller.removesuffix(GROUPS))
            command = [*launched_by, sys.executable, str(WORKER)]
            # one thread a worker, on any number of cores: TensorFlow's cannot change between cases
            environ = {"OMP_NUM_THREADS": "1", "HVDTRAIN_TEST_POOL": "1"}
            if key.controller.endswith(GROUPS):  # Horovod reads it when its first case starts it
                environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
            # Gloo counts the time in which its workers are stopped
            environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(_SESSION_SECONDS)
            if key.controller == "none":  # as jobs do; MPI could not start again after a case that failed
                environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
            self._job = started([*command, name, key.framework], self._folder, **environ)
            self._workers = dict(sorted(self._accept(listener).items()))
        pids = [str(worker.pid) for worker in self._workers.values()]
        # if this process is killed, its end of the pipe closes: the workers continue and find it gone
        self._guard = subprocess.Popen(
            ["sh", "-c", 'read _; kill -CONT "$@"', "sh", *pids],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._signal(signal.SIGSTOP)  # Horovod's threads take up to a third of a core while they wait

    def run(self, function: str, arguments: dict[str, Any], timeout: float, **case: Any) -> Done:
        """Run a case on all workers; fail and end the pool if it raises on one, or takes too long."""
        try:
            return self._run(function, arguments, timeout, case)
        except BaseException:  # the session's time limit or Ctrl-C: its workers may still be busy
            self.end()
            raise

    def _run(self, function: str, arguments: dict[str, Any], timeout: float, case: dict[str, Any]) -> Done:
        self._cases += 1
        self._signal(signal.SIGCONT)
        capture = self._folder / f"case-{self._cases}"
        capture.mkdir()
        case |= {
            "function": function,
            "arguments": arguments,
            "capture": str(capture),
            "seconds": max(1.0, timeout - 2),
            "number": self._cases,
        }
        try:
            for worker in self._workers.values():
                worker.send(case)
        except OSError:
            self._fail(f"{self.key} ended before its case {self._cases}")
        answers = self._answers(timeout)
        texts = {name: self._written(capture, name) for name in ("stdout", "stderr")}
        done = Done(
            [answers[rank]["value"] for rank in sorted(answers)],
            *("".join(text.values()) for text in texts.values()),
            frozenset(rank for text in texts.values() for rank, written in text.items() if written),
        )
        failed = [rank for rank in self._workers if answers.get(rank, {"error": True})["error"]]
        if failed:
            self._fail(
                f"{function}({arguments}) failed on ranks {failed} of {self.key}",
                f"{done.stdout[-6000:]}{done.stderr[-6000:]}",
            )
        self._signal(signal.SIGSTOP)
        return done

    def end(self) -> None:
        """Kill the workers and their launcher; how jobs end is for launches to show."""
        if not self.alive:
            return
        self.alive = False
        self._job.kill()
        for worker in self._workers.values():
            worker.close()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()

    def _signal(self, number: int) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)

    def _accept(self, listener: socket.socket) -> dict[int, _Worker]:
        found: dict[int, _Worker] = {}
        deadline = time.monotonic() + _START_SECONDS
        while len(found) < self.key.workers:
            listener.settimeout(1)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._job.process.poll() is not None or time.monotonic() > deadline:
                    self._workers = found
                    self._fail(f"{self.key} did not start")
                continue
            worker = _Worker(connection)
            found[worker.rank] = worker
        return found

    def _answers(self, timeout: float) -> dict[int, Any]:
        """Return what the workers answer in time, by rank; not all of them where one fails."""
        answers: dict[int, Any] = {}
        waiting, deadline = dict(self._workers), time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select(list(waiting.values()), [], [], left)
            for rank in [rank for rank, worker in waiting.items() if worker in ready]:
                answers[rank] = waiting.pop(rank).receive() or {"value": None, "error": "it ended"}
                assert answers[rank].get("number", self._cases) == self._cases, "the answer of another case"
                if answers[rank]["error"]:
                    deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
        return answers

    def _written(self, folder: Path, name: str) -> dict[int, str]:
        paths = {rank: folder / f"{name}-{rank}" for rank in self._workers}
        return {
            rank: path.read_bytes().decode(errors="replace").replace("\r\n", "\n")
            for rank, path in paths.items()
            if path.exists()
        }

    def _fail(self, problem: str, output: str = "") -> NoReturn:
        """End the pool at once and raise, with all that was written."""
        error = AssertionError(f"{problem}:\n{output}\nthe launch:\n{self._job.result().output[-3000:]}")
        self.end()
        raise error


def _launched(key: Key) -> Pool:
    """Launch a pool; once more if mpirun meets what one of the same process id left when it was killed."""
    try:
        return Pool(key)
    except AssertionError as error:
        if _LEFT_BEHIND not in str(error):
            raise
        return Pool(key)


class _Pools:
    """The pools of this session, the one used last at the end."""

    def __init__(self) -> None:
        self._pools: dict[Key, Pool] = {}

    def get(self, key: Key) -> Pool:
        """Return a pool that is alive; the ones that were not used for longest make room for a new one."""
        pool = self._pools.pop(key, None)
        if pool is None or not pool.alive:
            while self._pools and key.workers + sum(k.workers for k in self._pools) > MAX_WORKERS:
                self._pools.pop(next(iter(self._pools))).end()
            pool = _launched(key)
        self._pools[key] = pool
        return pool

    def drop(self, key: Key) -> None:
        """End a pool, if it is there."""
        if (pool := self._pools.pop(key, None)) is not None:
            pool.end()

    def end(self) -> None:
        """End all pools."""
        for key in list(self._pools):
            self.drop(key)


POOLS = _Pools()


def call(
    key: Key, function: str, cwd: Path, timeout: float = LIMIT_SECONDS, environ: dict[str, str] | None = None,
    **arguments: Any,
) -> Done:  # fmt: skip
    """Run a function on every worker of a pool; fail if it raises, or takes too long.

    It is named as ``module:function`` below tests/, or ``path/to/file.py:function``; its arguments and what
    it returns are what JSON can say. Horovod's own variables in ``environ`` come too late.
    """
    return POOLS.get(key).run(function, arguments, timeout, cwd=str(cwd), environ=environ or {})


def command(
    workers: int, controller: str, framework: str, *words: str, cwd: Path, timeout: float = LIMIT_SECONDS,
    **environ: str,
) -> Result:  # fmt: skip
    """Run ``hvdtrain`` with these words in a pool; return its exit code, as rank 0 has it, and its output."""
    key = Key(framework, controller, workers)
    done = call(key, "support.cases:training_command", cwd, timeout, environ, words=list(words))
    failed = [code for code, _ in done.values if code]
    if workers > 1 and any(has_left for _, has_left in done.values):
        POOLS.drop(key)  # MPI starts only once
    return Result(failed[0] if failed else 0, done.stdout, done.stderr, done.spoke - {0})


def train(
    workers: int, controller: str, *options: str, cwd: Path, framework: str = "",
    timeout: float = LIMIT_SECONDS, **environ: str,
) -> Run:  # fmt: skip
    """Train in a pool to the good end, writing to the folder ``run`` in ``cwd``; as jobs.train."""
    words = [*options, "--run-dir", str(cwd / "run")]
    framework = framework or framework_of(options)
    result = command(workers, controller, framework, *words, cwd=cwd, timeout=timeout, **environ)
    assert result.returncode == 0, f"{words} ended with {result.returncode}:\n{result.output[-5000:]}"
    return Run(cwd / "run", result)


def documented(words: tuple[str, ...], cwd: Path) -> Result:
    """Run ``[horovodrun -np N] python -m hvdtrain ...`` in a pool that is started as the command says."""
    place = words.index("hvdtrain")
    start, own = words[: place - 2], words[place + 1 :]  # without `python -m`
    assert words[place - 2 : place] == ("python", "-m")
    framework = framework_of(own) if "--framework" in own else "torch"
    if not start:
        return command(1, "none", framework, *own, cwd=cwd)
    assert start[0] == "horovodrun"
    controller = "gloo" if "--gloo" in start else f"mpi{GROUPS}" if "--stages" in own else "mpi"
    return command(int(start[start.index("-np") + 1]), controller, framework, *own, cwd=cwd)


@functools.cache
def shared_run(workers: int, controller: str, *options: str) -> Run:
    """Train once per set of options; tests that compare curves share their runs."""
    return train(workers, controller, *options, cwd=temporary_folder())


def run_suite(
    path: Path, workers: int, controller: str, framework: str, *, cwd: Path, timeout: float, marks: str = ""
) -> None:
    """Run a file of tests in a pool: every worker runs all of them, or those with ``marks`` (as -m)."""
    done = call(
        Key(framework, controller, workers),
        "support.cases:suite",
        cwd,
        timeout,
        path=str(path),
        framework=framework,
        marks=marks,
    )
    assert "passed" in done.stdout


def controller_of(framework: str, workers: int) -> str:
    """Return the controller of a job for which any one does, so that such jobs share pools."""
    return "none" if workers == 1 else {"torch": "mpi", "tf": "gloo"}[framework]


def framework_of(options: tuple[str, ...]) -> str:
    """Return the framework that options name."""
    return options[options.index("--framework") + 1]
