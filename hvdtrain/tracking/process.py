"""The process that sends a run to one tracker while a job trains.

It reads what the job writes into the run directory, so the job never waits for it. Its standard input tells
it that the job is over, or that another worker writes from now on; if the job is killed, the input ends.
It prints what the user should know, a line of text each.
"""

import argparse
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hvdtrain.checkpoints.linked_copy import remove_copies
from hvdtrain.host.side_process import own_output, stay_out_of_the_way
from hvdtrain.trackers import TRACKERS
from hvdtrain.tracking.folder import FOLDER, without_password
from hvdtrain.tracking.loading import LOADERS, tracked_run
from hvdtrain.tracking.sender import Sender, lines_to_send, status_when_over
from hvdtrain.tracking.sender_lock import lock_file, take
from hvdtrain.tracking.state import SenderState
from hvdtrain.tracking.tracker import PermanentError

OVER, LEFT = b"over\n", b"left\n"  # what a job says: it has ended; another worker goes on
LAST_SECONDS = 10.0  # for what is not sent when the job is over
_KILLED_SECONDS = 4.0  # likewise if the job was killed
_LEFT_SECONDS = 0.5  # likewise if the sender of another worker goes on
_POLL_SECONDS = 1.0
_LONGEST_WAIT = 30.0  # between attempts while a tracker does not answer
_LAST_ATTEMPTS = 3
_LOCK_SECONDS = 0.2
_LONGEST_ERROR = 200  # characters
_END = "how the run ended"
_NO_ANSWER = re.compile(r"Pool\(host='([^']*)', port=(\d+)\)")  # what the library requests says


def main(words: list[str]) -> None:
    """Send a run until its job is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("tracker", choices=list(LOADERS))
    parser.add_argument("--checkpoints", action="store_true")
    options = parser.parse_args(words)
    say = own_output()
    stay_out_of_the_way()
    following = Following(options.run_dir, options.tracker, say, options.checkpoints)
    try:
        following.run()
    except OSError as error:
        say(f"{following.title}: nothing is sent: {error}")


class Following:
    """Sends what a job writes until it is over.

    Args:
        run_dir: the run directory.
        name: the tracker's name.
        say: shows a line of text to the user.
        with_checkpoints: whether to send checkpoints, too.
        job: a descriptor from which the job is heard.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        say: Callable[[str], None],
        with_checkpoints: bool = False,
        job: int = 0,
    ) -> None:
        self.title = TRACKERS[name].title
        self._run_dir, self._name, self._say = run_dir, name, say
        self._with_checkpoints, self._job = with_checkpoints, job
        self._heard, self._is_over = b"", threading.Event()
        self._is_done = threading.Event()
        self._problem = ""
        self._is_known = False  # whether the user knows where the run is
        self._failures = 0
        self._sends = False  # whether this process has the lock

    def run(self) -> None:
        """Send until the job is over and all is sent, or for some seconds after it.

        Raises:
            OSError: If the run directory can be neither read nor written.
        """
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            with lock_file(self._run_dir, self._name) as lock:
                while not take(lock):  # the sender of the job before is at its end
                    if self._is_over.wait(_LOCK_SECONDS):
                        self._problem = "another process sends this run"
                        self._give_up()
                        return
                self._sends = True
                self._send()
        finally:
            self._is_done.set()

    def _send(self) -> None:
        run = tracked_run(self._run_dir)
        sender = Sender(run, self._name, LOADERS[self._name], self._with_checkpoints)
        while not self._is_over.wait(self._wait_seconds()):
            self._try(sender.round, sender)
        if self._heard == LEFT:
            return

        for _ in range(_LAST_ATTEMPTS):
            if self._try(lambda: sender.end(status_when_over(self._run_dir)), sender):
                return
            time.sleep(1)
        self._give_up()

    def _listen(self) -> None:
        """Wait until the job is over, then some seconds for what is not sent: a library may take longer."""
        self._heard = os.read(self._job, 64)
        self._is_over.set()
        seconds = {OVER: LAST_SECONDS, LEFT: _LEFT_SECONDS}.get(self._heard, _KILLED_SECONDS)
        if not self._is_done.wait(seconds):
            self._problem = self._problem or f"still at work {seconds:g} s after the end of the job"
            self._give_up()

    def _try(self, step: Callable[[], None], sender: Sender) -> bool:
        """Do a step of sending; tell the user when the tracker fails, and when it answers again."""
        try:
            step()
        except Exception as error:
            self._failures += 1
            self._note_problem(error)
            return False
        finally:
            for note in sender.notes():
                self._say(f"{self.title}: {note}")
        if self._problem:
            self._say(f"{self.title}: it answers again, and has all that was logged meanwhile")
        if not self._is_known:
            self._say(f"{self.title}: {sender.state.where()}")
        self._is_known, self._problem, self._failures = True, "", 0
        return True

    def _note_problem(self, error: Exception) -> None:
        reason = describe_error(error)
        if not self._problem:
            again = "" if isinstance(error, PermanentError) else ", and sending is tried again"
            self._say(f"{self.title}: {reason}; training continues{again}")
        self._problem = reason

    def _wait_seconds(self) -> float:
        return min(_LONGEST_WAIT, _POLL_SECONDS * 2.0 ** min(self._failures, 10))

    def _give_up(self) -> None:
        """End this process: the job does not wait any longer."""
        self._is_done.set()
        if self._heard != LEFT:  # the sender of another worker goes on
            with suppress(Exception):
                text = f"{self.title}: {self._unsent()}"
                print(text, file=sys.stderr, flush=True)  # the log: if the job was killed, nobody listens
                self._say(text)
        if self._sends:
            self._say = lambda text: None  # what is sent now ends with an error
            remove_copies(self._run_dir / FOLDER, self._name)
        os._exit(1)

    def _unsent(self) -> str:
        return unsent(
            self._run_dir, self._name, self._problem, with_checkpoints=self._with_checkpoints, is_over=True
        )


def unsent(
    run_dir: Path, name: str, problem: str = "", *, with_checkpoints: bool = False, is_over: bool = False
) -> str:
    """Return in words what is not sent, and the command that sends it.

    Args:
        run_dir: the run directory.
        name: the tracker's name.
        problem: why it is not sent; empty if that is not known.
        with_checkpoints: whether checkpoints are sent, too.
        is_over: whether the job is over.
    """
    lines, shown = 0, ""
    with suppress(OSError):
        lines = lines_to_send(run_dir, name)
    parts = [f"{lines:,} lines of metrics.jsonl"] if lines else []
    state = SenderState.read(run_dir / FOLDER / f"{name}.json")
    if is_over and state.run and not state.status:
        parts.append(_END)
        shown = f"; until then {TRACKERS[name].title} shows it as running"
    verb, them = ("is", "it") if parts == [_END] else ("are", "them")
    what = f"{' and '.join(parts)} {verb} not sent" if parts else "not all of this run is sent"
    reason = f" ({problem})" if problem else ""
    options = f"--to {name}" + (" --checkpoints" if with_checkpoints else "")
    return f"{what}{reason}; to send {them}: python -m hvdtrain track {run_dir} {options}{shown}"


def describe_error(error: Exception) -> str:
    """Return an error of a tracker's library in one line."""
    text = without_password(" ".join(str(error).split())) or type(error).__name__
    if found := _NO_ANSWER.search(text):
        return f"{found[1]}:{found[2]} does not answer"
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."


if __name__ == "__main__":
    main(sys.argv[1:])
