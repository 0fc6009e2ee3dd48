"""MLflow's own server with a database, on this host."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from support.jobs import environment

_START_SECONDS = 300


class MlflowServer:
    """A server on a port of loopback whose data stay in a folder when it is killed."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.uri = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        words = ["--backend-store-uri", f"sqlite:///{self.folder}/runs.db", "--host", "127.0.0.1"]
        words += ["--artifacts-destination", f"{self.folder}/artifacts", "--port", str(self.port)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", "--workers", "1", *words],
                cwd=self.folder,
                env={**environment(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # its jobs need huey
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + _START_SECONDS
        while not self._answers():
            text = (self.folder / "server.log").read_text()
            assert self._process.poll() is None, text[-3000:]
            assert time.monotonic() < until, text[-3000:]
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill it and its processes, if it runs."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
