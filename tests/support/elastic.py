"""A cluster of processes on this machine for the driver of an elastic job, and a job that it runs."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from hvdtrain.elastic.driver.cluster import Limits, Slot
from hvdtrain.elastic.driver.driver import STATE_VARIABLE, Driver
from hvdtrain.elastic.driver.events import Finish
from hvdtrain.host.hostfile import HostSlots

TOY = Path(__file__).with_name("toy_worker.py")


class FakeProcess:
    """A process of this machine that stands for one on some host."""

    def __init__(
        self, words: Sequence[str], environ: Mapping[str, str], on_exit: Callable[[int], None]
    ) -> None:
        self.process = subprocess.Popen(words, env=environ)
        threading.Thread(target=lambda: on_exit(self.process.wait()), daemon=True).start()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()


class FakeStore:
    """Tells the workers of a world where rank 0 listens."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        root, waiting = 0, []
        with contextlib.suppress(OSError, ValueError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                connection.settimeout(2)
                key, rank, port = json.loads(connection.makefile("rb").readline())
                assert key == self._key, "a stranger in the store"
                if rank == 0:
                    root = port
                else:
                    waiting.append(connection)
                if root:
                    for one in waiting:
                        one.sendall(json.dumps(root).encode() + b"\n")
                    waiting.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()


class FakeCluster:
    """Hosts that are all this machine.

    Args:
        hosts: their names and slots; a test may change them at any time.
        words: the command of a worker.
        environ: added to its environment.
        key: the key of the job.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        words: Sequence[str],
        key: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.now_hosts = list(hosts)
        self.addresses: Sequence[tuple[str, int]] = ()
        self.listen_on: Sequence[str] = ["127.0.0.1"]
        self.words, self.environ, self.key = list(words), dict(environ or {}), key
        self.processes: dict[str, FakeProcess] = {}
        self.said: list[str] = []
        self.environ_of: Callable[[str, Slot], Mapping[str, str]] = lambda worker, slot: {}

    def hosts(self) -> Sequence[HostSlots]:
        return [HostSlots(*host) for host in self.now_hosts]

    def start(self, worker: str, slot: Slot, on_exit: Callable[[int], None]) -> FakeProcess:
        environ = {
            **os.environ,
            "HVDTRAIN_ELASTIC": ",".join(f"{host}:{port}" for host, port in self.addresses),
            "HVDTRAIN_WORKER": worker,
            "HVDTRAIN_SLOT": str(slot.number),
            "HOROVOD_RENDEZVOUS_KEY": self.key,
            "TOY_HOST": slot.host,
            **self.environ,
            **self.environ_of(worker, slot),
        }
        self.processes[worker] = FakeProcess(self.words, environ, on_exit)
        return self.processes[worker]

    def kill_far(self, host: str, pid: int, process_seconds: float) -> None:
        with contextlib.suppress(psutil.Error, OSError):
            psutil.Process(pid).kill()

    def open_store(self, key: str) -> FakeStore:
        return FakeStore(key)

    def address_for(self, host: str) -> str:
        return "127.0.0.1"

    def say(self, text: str) -> None:
        self.said.append(text)


class ToyJob:
    """A job of toy workers, whose driver runs in a thread.

    Args:
        folder: for its files.
        limits: what it may have.
        hosts: its hosts.
        steps: how many steps it trains, unless it finishes earlier.
        environ: of its workers.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        hosts: Sequence[tuple[str, int]],
        steps: int = 1_000_000,
        words: Sequence[str] = (),
        **environ: str,
    ) -> None:
        self.folder, self.steps = folder, steps
        self.key = secrets.token_hex(16)
        self.cluster = FakeCluster(
            hosts, words or [sys.executable, str(TOY), str(folder), str(steps)], self.key, environ
        )
        self._state = folder / "state.json"
        self.driver = Driver(limits, self.cluster, self.key, environ={STATE_VARIABLE: str(self._state)})
        self.outcome: Finish | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "ToyJob":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(2):
            if self._thread.is_alive():
                self.driver.signal(signal.SIGTERM)
        self._thread.join(120)
        for process in self.cluster.processes.values():
            process.process.poll() is None and process.kill()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self.outcome = self.driver.run()

    def ended(self, seconds: float = 120) -> Finish:
        """Wait for the end, and return it; no process is left."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), self.cluster.said
        assert self.outcome is not None, self.cluster.said
        left = [name for name, one in self.cluster.processes.items() if one.process.poll() is None]
        assert not left, f"processes left: {left}"
        return self.outcome

    def finish(self) -> Finish:
        """Let training be complete after the next step, and wait for the end."""
        (self.folder / "finish").touch()
        outcome = self.ended()
        self.steps = self.step()
        return outcome

    def state(self) -> dict:
        """Return what the driver says of its workers."""
        with contextlib.suppress(OSError):
            return json.loads(self._state.read_text())
        return {"state": "", "generation": 0, "members": []}

    def members(self, *stages: str) -> list[dict]:
        return [one for one in self.state()["members"] if one["stage"] in (stages or ("training",))]

    def until(self, is_so: Callable[["ToyJob"], bool], seconds: float = 60) -> None:
        """Wait until something holds."""
        until = time.monotonic() + seconds
        while not is_so(self):
            assert time.monotonic() < until, (self.state(), self.cluster.said)
            assert self._thread.is_alive(), (self.outcome, self.cluster.said)
            time.sleep(0.02)

    def trains(self, count: int, step: int = 0) -> None:
        """Wait until a number of workers train, and have passed a step."""
        self.until(lambda job: len(job.members()) == count and job.step() >= step)

    def step(self) -> int:
        """Return the step at which the log ends."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            return json.loads((self.folder / "log").read_text().splitlines()[-1])[0]
        return 0

    def rows(self) -> list[list[int]]:
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]
