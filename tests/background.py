"""Run a command while slow preparations run in the background, each with a log and a time limit.

    python tests/background.py [image] [build] -- make test test-cluster

``image`` is the image that tests/cluster needs, ``build`` the test of Horovod's wheel in another environment
(tests/build). Both run at low priority. The command finds the image by HVDTRAIN_TEST_IMAGE_BUILD.
Afterwards the preparations get what is left of their time; the log of one that failed is printed. Nothing
of them stays behind.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

HERE = Path(__file__).parent
SECONDS = 2100  # in which a preparation must have ended
IMAGE_BUILD = "HVDTRAIN_TEST_IMAGE_BUILD"
_IMAGE = [sys.executable, str(HERE / "cluster" / "image.py")]
_END_SECONDS = 20  # that a process gets between SIGTERM and SIGKILL
_LOG_BYTES = 30_000


class Preparation:
    """A command in a process group of its own, which ends with this process.

    Args:
        folder: its log goes there.
        niceness: its priority, as ``nice`` counts it.
        seconds: after which it is ended; it has failed then.
    """

    def __init__(
        self, name: str, command: list[str], folder: Path, niceness: int = 10, seconds: float = SECONDS
    ) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self._deadline = time.monotonic() + seconds
        limits = ["timeout", "--foreground", "--kill-after=10", str(seconds)]
        dies_with_us = ["setpriv", "--pdeathsig", "TERM"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*dies_with_us, *limits, "nice", "-n", str(niceness), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> bool:
        """Wait for its end, and print its log if it failed; return whether it succeeded."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0, self._deadline - time.monotonic()) + _END_SECONDS)
        code = self._process.poll()
        if code != 0:
            print(f"== {self.name} failed with {code}; the end of its log:", flush=True)
            print(self.log.read_text(errors="replace")[-_LOG_BYTES:], flush=True)
        return code == 0

    def end(self) -> None:
        """End all of its processes: first with SIGTERM, then with SIGKILL."""
        known = self._processes()
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        while self._signal(0) and time.monotonic() < deadline:
            known |= self._processes()
            self._process.poll()
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        for process in known:  # compilers are in groups of their own
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def _processes(self) -> set[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return set(psutil.Process(self._process.pid).children(recursive=True))
        return set()

    def _signal(self, number: int) -> bool:
        """Send a signal to the group; return whether there is one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
            return True
        return False


@contextlib.contextmanager
def prepared(names: list[str], folder: Path) -> Iterator[tuple[list[Preparation], dict[str, str]]]:
    """Context with running preparations, and what the command's environment needs to find them."""
    started, environ = [], {}
    image = folder / "image"
    try:
        if "image" in names:
            # before the build: tests wait for the image
            started.append(Preparation("image", [*_IMAGE, "build", str(image)], folder, niceness=5))
            environ[IMAGE_BUILD] = str(image)
        if "build" in names:
            tests = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(HERE / "build")]
            started.append(Preparation("build", ["env", "HVDTRAIN_REAL_BUILD=1", *tests], folder))
        yield started, environ
    finally:
        for one in started:
            one.end()
        if image.exists():
            subprocess.run([*_IMAGE, "remove", str(image)], check=True, timeout=120)


def main() -> int:
    """Run the command; return its exit code, or 1 if a preparation failed."""
    separator = sys.argv.index("--")
    names, command = sys.argv[1:separator], sys.argv[separator + 1 :]
    if unknown := set(names) - {"image", "build"}:
        raise SystemExit(f"no such preparation: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (
        tempfile.TemporaryDirectory(prefix="hvdtrain-background-") as folder,
        prepared(names, Path(folder)) as (started, environ),
    ):
        code = subprocess.run(command, env={**os.environ, **environ}, check=False).returncode
        succeeded = [one.wait() for one in started]
    return code or int(not all(succeeded))


if __name__ == "__main__":
    sys.exit(main())
