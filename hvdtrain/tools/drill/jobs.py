"""Launching the jobs of a drill, with a limit, and leaving nothing behind."""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.drill.history import log_lines
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.processes import kill_group, start_group

_END_SECONDS = 15.0
_TASK = "hvdtrain.tools.drill.task:Drill"


@dataclass(frozen=True)
class Launch:
    """How the jobs of a drill are launched.

    Attributes:
        workers: number of workers.
        hosts: words for horovodrun that say where they run, such as ``("-H", "h1:2,h2:2")``.
        ssh: words for horovodrun on how to reach the hosts.
        most: workers that are never exceeded; None for ``workers``.
        cooldown_seconds: the shortest and longest time for which a slot that failed is left out.
        step_seconds: how long each step takes at least.
        start_seconds: how long a worker takes to start, beside what it needs.
    """

    workers: int
    hosts: tuple[str, ...]
    ssh: tuple[str, ...] = ()
    most: int | None = None
    cooldown_seconds: tuple[int, int] = (2, 60)
    step_seconds: float = 0.03
    start_seconds: float = 0.0

    def host_names(self) -> list[str]:
        """Return the names of the hosts."""
        return [entry.partition(":")[0] for entry in self.hosts[-1].split(",")]

    def command(self, framework: str, run_dir: Path, disturb: str = "", *options: str) -> list[str]:
        """Return the command of an elastic job that trains the task of the drill.

        Args:
            framework: "torch" or "tf".
            run_dir: its run directory.
            disturb: how it disturbs itself; see ``Drill``.
            options: more options of the training.
        """
        horovodrun = Path(sys.executable).with_name("horovodrun")
        launcher = str(horovodrun) if horovodrun.is_file() else shutil.which("horovodrun")
        if launcher is None:
            raise EnvironmentFault("there is no horovodrun", "Run: python -m hvdtrain build-horovod")
        elastic = ["-np", str(self.workers), "--min-np", "1", "--max-np", str(self.most or self.workers)]
        elastic += ["--blacklist-cooldown-range", *map(str, self.cooldown_seconds)]
        times = f"step_seconds: {self.step_seconds}, start_seconds: {self.start_seconds}"
        task = f"task_options={{disturb: '{disturb}', {times}}}"
        training = [sys.executable, "-m", "hvdtrain", "--framework", framework, "--task", _TASK]
        return [
            launcher,
            *elastic,
            *self.hosts,
            *self.ssh,
            *training,
            *("--run-dir", str(run_dir), "--set", task, *options),
        ]


class RunningJob:
    """Context with a job of the drill; at its end none of its processes that started here is left."""

    def __init__(self, command: Sequence[str], run_dir: Path) -> None:
        self._run_dir = run_dir
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the context
        self._process = start_group(command, stdout=self._output, stderr=subprocess.STDOUT)

    def __enter__(self) -> "RunningJob":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.stop()
            self.wait(_END_SECONDS)
        kill_group(self._process, _END_SECONDS)
        self._output.close()

    def stop(self) -> None:
        """Ask the launcher to stop the job."""
        self._process.send_signal(signal.SIGTERM)

    def wait_for_step(self, step: int, seconds: float) -> bool:
        """Wait until a step is logged; return whether it was, before the job ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if any(line["phase"] == "train" and line["step"] >= step for line in log_lines(self._run_dir)):
                return True
            if self._process.poll() is not None:
                return False
            time.sleep(0.05)
        return False

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the job; return its exit code, None if it did not end in time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        """Return the last lines of what the job printed."""
        self._output.seek(0)
        return "\n".join(self._output.read().decode(errors="replace").splitlines()[-20:])
