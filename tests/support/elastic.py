"""A cluster of processes on this machine for the driver of an elastic job, and a job that it runs."""

import contextlib
import json
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

from hvdtrain.elastic.driver.driver import STATE_VARIABLE, Driver
from hvdtrain.elastic.driver.records import Finish, Limits, Slot
from hvdtrain.host.hostfile import HostSlots

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class FakeProcess:
    """A process of this machine that stands for one on some host."""

    def __init__(self, words: Sequence[str], on_exit: Callable[[int], None]) -> None:
        self.process = subprocess.Popen(words)
        threading.Thread(target=lambda: on_exit(self.process.wait()), daemon=True).start()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()


class FakeCluster:
    """Hosts that are all this machine, with their names and slots, and the command of a worker."""

    def __init__(self, hosts: Sequence[tuple[str, int]], words: Sequence[str]) -> None:
        self._hosts, self._words = hosts, words
        self.addresses: Sequence[tuple[str, int]] = ()
        self.listen_on: Sequence[str] = ["127.0.0.1"]
        self.processes: dict[str, FakeProcess] = {}
        self.said: list[str] = []

    def hosts(self) -> Sequence[HostSlots]:
        return [HostSlots(*host) for host in self._hosts]

    def start(self, worker: str, slot: Slot, on_exit: Callable[[int], None]) -> FakeProcess:
        self.processes[worker] = FakeProcess(self._words, on_exit)
        return self.processes[worker]

    def kill_far(self, host: str, pid: int, process_seconds: float) -> None:
        pass

    def open_store(self, key: str) -> SimpleNamespace:
        """Return a rendezvous at which nobody meets."""
        return SimpleNamespace(port=1, close=lambda: None)

    def address_for(self, host: str) -> str:
        return "127.0.0.1"

    def say(self, text: str) -> None:
        self.said.append(text)


class DriverJob:
    """A job of one worker's process, whose driver runs in a thread and writes its state into a folder."""

    def __init__(self, folder: Path, words: Sequence[str] = SLEEP) -> None:
        self.key = secrets.token_hex(16)
        self.cluster = FakeCluster([("h1", 1)], words)
        self._state = folder / "state.json"
        environ = {STATE_VARIABLE: str(self._state)}
        self.driver = Driver(Limits(1, 1, 1), self.cluster, self.key, environ=environ)
        self.outcome: Finish | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "DriverJob":
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

    def ended(self, seconds: float = 120) -> Finish | None:
        """Wait for the end, and return it; no process is left."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), self.cluster.said
        left = [name for name, one in self.cluster.processes.items() if one.process.poll() is None]
        assert not left, f"processes left: {left}"
        return self.outcome

    def members(self) -> list[dict]:
        """Return what the driver says of its workers."""
        with contextlib.suppress(OSError):
            return json.loads(self._state.read_text())["members"]
        return []

    def until(self, is_so: Callable[["DriverJob"], bool], seconds: float = 60) -> None:
        """Wait until something holds."""
        until = time.monotonic() + seconds
        while not is_so(self):
            assert time.monotonic() < until, (self.members(), self.cluster.said)
            assert self._thread.is_alive(), (self.outcome, self.cluster.said)
            time.sleep(0.02)
