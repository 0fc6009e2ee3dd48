"""What a job does for its trackers: it starts their senders, and shows what they say."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.callbacks import Callback, RunContext, Summary
from hvdtrain.host.side_process import side_environment
from hvdtrain.metrics import StepInfo
from hvdtrain.trackers import TRACKERS
from hvdtrain.tracking.folder import add_start, tracking_folder, write_id
from hvdtrain.tracking.process import LAST_SECONDS, LEFT, OVER, unsent

_MODULE = "hvdtrain.tracking.process"
_GRACE_SECONDS = 1.0
_KILL_SECONDS = 1.0  # from SIGKILL to the end of a process
_READ_BYTES = 1 << 16


class JobTracking(Callback):
    """The built-in callback that has a run sent to trackers. Rank 0 alone has it.

    Args:
        names: the trackers, each of which has a sender.
        tracking_id: the run's name among trackers.
        facts: what is known of the job beside its config: hosts, commit, what differs from the job before.
        with_checkpoints: whether to send checkpoints, too.
    """

    def __init__(
        self,
        names: Collection[str],
        tracking_id: str,
        facts: Mapping[str, Any],
        with_checkpoints: bool = False,
    ) -> None:
        self._names, self._tracking_id, self._facts = names, tracking_id, facts
        self._with_checkpoints = with_checkpoints
        self._senders: list[_SenderProcess] = []
        self._is_over = False
        self._note: Callable[[str], None] = lambda text: None

    def on_start(self, context: RunContext) -> None:
        """Note when the job starts, and start the senders."""
        self._note = context.note
        if self._senders:
            return
        start = {
            "step": context.steps_done,
            "seconds": round(context.seconds(), 4),
            "time": round(time.time(), 3),
            "framework": context.config.framework,
            "workers": context.workers,
            **self._facts,
        }
        try:
            write_id(context.run_dir, self._tracking_id)
            add_start(context.run_dir, start)
            for name in self._names:
                self._senders.append(_SenderProcess(context.run_dir, name, self._with_checkpoints))
        except OSError as error:
            self._note(f"trackers: not all of this run is sent: {error}; training continues")

    def on_window(self, step: StepInfo, values: Mapping[str, float]) -> None:
        """Show what senders say."""
        self._show()

    def on_evaluation(self, step: StepInfo, metrics: Mapping[str, float]) -> None:
        """Show what senders say."""
        self._show()

    def on_end(self, summary: Summary) -> None:
        """Note that the job is over, and not only this worker's part in it."""
        self._is_over = True

    def close(self) -> None:
        """Tell the senders that there is no more to come, and wait some seconds until all is sent."""
        for sender in self._senders:
            sender.tell(OVER if self._is_over else LEFT)
        until = time.monotonic() + _GRACE_SECONDS + (LAST_SECONDS if self._is_over else 0.0)
        for sender in self._senders:
            if not sender.ended_before(until):
                text = sender.kill()
                if self._is_over:  # the sender of another worker goes on
                    self._note(f"{sender.title}: {text}")
        self._show()
        for sender in self._senders:
            sender.close()
        self._senders = []

    def _show(self) -> None:
        for sender in self._senders:
            for text in sender.heard():
                self._note(text)


class _SenderProcess:
    """The process that sends to one tracker.

    Args:
        run_dir: the run directory.
        name: the tracker's name.
        with_checkpoints: whether it sends checkpoints, too.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self, run_dir: Path, name: str, with_checkpoints: bool) -> None:
        self.title = TRACKERS[name].title
        self._run_dir, self._name, self._with_checkpoints = run_dir, name, with_checkpoints
        self._text, self._is_told, self._has_said_end = b"", False, False
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        log = os.open(tracking_folder(run_dir) / f"{name}.log", flags, 0o666)
        command = [sys.executable, "-m", _MODULE, str(run_dir), name]
        try:
            self._process = subprocess.Popen(
                [*command, "--checkpoints"] if with_checkpoints else command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=side_environment(),
                start_new_session=True,  # Ctrl-C, and a launcher that ends its workers, leave it some seconds
            )
        finally:
            os.close(log)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def tell(self, word: bytes) -> None:
        """Tell it something, and no more after that."""
        assert self._process.stdin is not None
        self._is_told = True
        with suppress(OSError):  # it has ended
            os.write(self._process.stdin.fileno(), word)
        self._process.stdin.close()

    def heard(self) -> list[str]:
        """Return what it said since the last call."""
        assert self._process.stdout is not None
        with suppress(OSError):
            while found := os.read(self._process.stdout.fileno(), _READ_BYTES):
                self._text += found
        *lines, self._text = self._text.split(b"\n")
        texts = [line.decode(errors="replace") for line in lines]
        if not self._is_told and not self._has_said_end and (code := self._process.poll()) is not None:
            self._has_said_end = True
            texts.append(f"{self.title}: its sender ended with {code}; {self._unsent()}")
        return texts

    def ended_before(self, until: float) -> bool:
        """Wait for its end; return whether it came before a time of ``time.monotonic``."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> str:
        """Kill it and its process group; return in words what that means.

        W&B's library starts a process in a group of its own, which ends by itself some seconds later.
        """
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it cannot be killed while its file system does not answer
            self._process.wait(_KILL_SECONDS)
        return self._unsent("its sender did not end")

    def _unsent(self, problem: str = "") -> str:
        options = {"with_checkpoints": self._with_checkpoints, "is_over": self._is_told}
        return unsent(self._run_dir, self._name, problem, **options)

    def close(self) -> None:
        """Close what it was heard by."""
        assert self._process.stdout is not None
        self._process.stdout.close()
