"""Sending what a run has written to trackers: by threads of rank 0 while it trains, or by a command later.

The log of the run is the queue. In the folder ``tracking`` next to it lie the name that the run has among
trackers and, for each tracker, how many lines of the log it was sent.
"""

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.callbacks import Callback, RunContext, Summary
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, copied
from hvdtrain.config.values import TRACKERS
from hvdtrain.errors import EnvironmentFault, HvdtrainError
from hvdtrain.reporting.jsonl import LONGEST_LINE, write_json
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.reporting.stored_runs import CONFIG_FILE, describe_broken, read_config
from hvdtrain.storage.files import check_link, open_regular, read_regular
from hvdtrain.trackers.services import CLIENTS, TrackedRun, row_of, without_password

FOLDER, ID_FILE = "tracking", "id.json"
LAST_SECONDS = 10.0  # for what is not sent when the job is over
_LEFT_SECONDS = 2.0  # likewise if another worker continues the run
_POLL_SECONDS, _LONGEST_WAIT = 1.0, 30.0  # between attempts, which are fewer while a tracker does not answer
_LAST_ATTEMPTS = 3
_LINES = 150  # in one request
_MAX_BYTES = 1 << 22
_LONGEST_ERROR = 200  # characters
_ID = re.compile("[0-9a-z]{8,64}")
_NO_ANSWER = re.compile(r"Pool\(host='([^']*)', port=(\d+)\)")  # what the library requests says
_NOT_SENT = ("run_dir", "resume", "track", "track_checkpoints")


def read_id(run_dir: Path) -> str | None:
    """Return the name that trackers know a run by; None if it has none, or none that can be read."""
    found = str(_read(run_dir / FOLDER / ID_FILE).get("id"))
    return found if _ID.fullmatch(found) else None


def note_start(run_dir: Path, run: TrackedRun) -> None:
    """Keep the name of a run in its directory, and what is known of the job that starts."""
    check_link(run_dir / FOLDER, run_dir)
    (run_dir / FOLDER).mkdir(exist_ok=True)
    values = {"id": run.id, "began_seconds": run.began_seconds, "facts": dict(run.facts)}
    write_json(run_dir / FOLDER / ID_FILE, values)


def read_tracked_run(run_dir: Path) -> TrackedRun:
    """Return what trackers are sent of a run besides its log; a run that was never tracked gets a name."""
    if (found := read_id(run_dir)) is None:
        found, began_seconds = uuid.uuid4().hex, (run_dir / CONFIG_FILE).stat().st_mtime
        note_start(run_dir, TrackedRun(found, began_seconds))
    values = _read(run_dir / FOLDER / ID_FILE)
    config, _, problem = read_config(run_dir)
    config = config or {"config_error": problem}
    fields = {str(name): value for name, value in config.items() if name not in _NOT_SENT}
    facts = values.get("facts")
    began_seconds = float(values.get("began_seconds") or 0.0)
    return TrackedRun(found, began_seconds, facts if isinstance(facts, dict) else {}, run_dir, fields)


def _read(path: Path) -> dict[str, Any]:
    """Return the values in a file; none if there is no file, or none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_regular(path, _MAX_BYTES))
        return found if isinstance(found, dict) else {}
    return {}


class Abandoned(Exception):
    """Ends a thread whose run another process may send."""


class Sender:
    """Sends a run to one tracker, from where the last sender of this run directory ended."""

    def __init__(self, run_dir: Path, name: str, note: Callable[[str], None]) -> None:
        self.title = TRACKERS[name].title
        self.place = ""  # of the run at the tracker
        self.problem = ""  # why the last attempt failed
        self.note: Callable[[str], None] = lambda text: note(f"{self.title}: {text}")
        self.checkpoint: Path | None = None  # the newest one that is to be sent
        self.is_abandoned, self.is_done = threading.Event(), False
        self._run_dir, self._name = run_dir, name
        self._log, self._path = run_dir / METRICS_FILE, run_dir / FOLDER / f"{name}.json"
        self._tracker: Any = None
        self._run: TrackedRun | None = None  # while it is open
        self._sent_checkpoint: Path | None = None
        state = _read(self._path)
        count, self._sent_to, self._offset = state.get("lines"), str(state.get("place", "")), 0
        lines = self._unsent(count if isinstance(count, int) else 0)  # fewer, if the log was cut back
        self._lines, self._offset = len(lines), sum(map(len, lines))

    def send(self) -> None:
        """Send all lines that there are now, and the checkpoint."""
        self._send_lines()
        self._send_checkpoint()

    def end(self, status: str, error: str = "") -> None:
        """Send what is left, and how the run ended; there is no status if another worker continues it."""
        self._send_lines()
        try:
            self._send_checkpoint()
        except Exception as refusal:  # the end of the run is not kept back for it
            self.note(f"{self.checkpoint} is not sent: {describe_error(refusal)}")
        self._check()
        self._tracker.end(status, error)
        self._run, self.is_done = None, True

    def succeeds(self, step: Callable[[], None]) -> bool:
        """Do a step, and note when the tracker fails and when it answers; raises errors of the user."""
        before = self.problem
        try:
            step()
        except Abandoned:
            raise
        except Exception as error:
            self.problem, is_final = describe_error(error), isinstance(error, HvdtrainError)
            if is_final or not before:
                self.note(f"{self.problem}; training continues")
            if is_final:  # until the user changes something
                raise
            return False
        self.problem = ""
        if before:
            self.note("it answers again, and has all that was logged meanwhile")
        return True

    def describe_unsent(self, problem: str) -> str:
        """Return what is not sent of a run whose job is over and why, and the command that sends it."""
        what = "how the run ended is"
        with suppress(OSError):
            if lines := len(self._unsent(2**62)):
                what = f"{lines:,} lines of {METRICS_FILE} and how the run ended are"
        options = " --checkpoints" * (self.checkpoint != self._sent_checkpoint)
        command = f"python -m hvdtrain track {self._run_dir} --to {self._name}{options}"
        return f"{what} not sent ({problem}); to send the rest: {command}"

    def _check(self) -> None:
        if self.is_abandoned.is_set():
            raise Abandoned

    def _open(self) -> TrackedRun:
        self._check()
        if self._tracker is None:
            self._tracker = CLIENTS[self._name](self.note)
        if self._run is None:
            run = read_tracked_run(self._run_dir)
            self.place = self._tracker.open(run)
            self.note(f"this run is {self.place}")
            if self.place != self._sent_to:  # another server, or the run was deleted there
                self._sent_to, self._lines, self._offset = self.place, 0, 0
            self._run = run
        return self._run

    def _send_lines(self) -> None:
        run, broken = self._open(), list[int]()
        while lines := self._unsent(_LINES):
            rows = [row_of(line, run.began_seconds) for line in lines]
            broken += [number for number, row in enumerate(rows, self._lines + 1) if row is None]
            self._tracker.send([row for row in rows if row is not None])
            self._check()
            self._lines += len(lines)
            self._offset += sum(map(len, lines))
            write_json(self._path, {"place": self.place, "lines": self._lines})
        if broken:
            self.note(describe_broken(broken))

    def _send_checkpoint(self) -> None:
        newest = self.checkpoint  # which the training thread sets
        if newest == self._sent_checkpoint or newest is None:
            return
        with copied(newest, self._path.parent, self._name) as folder:
            if folder is not None:  # it was not removed meanwhile
                try:
                    storage.verify(folder)
                except (CorruptCheckpoint, EnvironmentFault) as error:
                    self.note(f"{newest.name} is not sent: {describe_error(error)}")
                else:
                    self._tracker.checkpoint(folder)
        self._sent_checkpoint = newest

    def _unsent(self, limit: int) -> list[bytes]:
        """Return the next lines of the log that were not sent, at most a number of them."""
        found: list[bytes] = []
        with suppress(FileNotFoundError), open_regular(self._log, follow=False) as file:
            file.seek(self._offset)
            while len(found) < limit and (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
                found.append(line)
        return found


class JobTracking(Callback):
    """The built-in callback of rank 0 that has a run sent to trackers, each by a thread of its own."""

    def __init__(
        self,
        names: Collection[str],
        run_dir: Path,
        tracking_id: str,
        facts: Mapping[str, Any],
        with_checkpoints: bool = False,
    ) -> None:
        self._run_dir, self._tracking_id, self._facts = run_dir, tracking_id, facts
        self._with_checkpoints = with_checkpoints
        self._senders = [Sender(run_dir, name, self._say) for name in names]
        self._is_over, self._ending = threading.Event(), ("", "")
        self._threads = list[threading.Thread]()  # one for each, once they are started
        self._note: Callable[[str], None] | None = None

    def on_start(self, context: RunContext) -> None:
        """Note that the job starts, and start the threads."""
        self._note = context.note
        began = round(time.time() - context.seconds(), 3)
        facts = {"step": context.steps_done, "workers": context.workers, **self._facts}
        try:
            note_start(self._run_dir, TrackedRun(self._tracking_id, began, facts))
        except OSError as error:
            self._senders = []
            self._say(f"trackers: nothing of this run is sent: {error}; training continues")
        for sender in self._senders:  # daemons: a process ends although a server is awaited
            thread = threading.Thread(target=self._send, args=[sender], daemon=True)
            thread.start()
            self._threads.append(thread)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Have the checkpoint sent; it takes the place of one that was not sent yet."""
        for sender in self._senders if self._with_checkpoints else ():
            sender.checkpoint = path

    def on_end(self, summary: Summary) -> None:
        """Note how the run ended; without this, another worker continues it."""
        self._ending = summary.status, summary.error or ""

    def close(self) -> None:
        """Wait some seconds until all is sent, and say what is not."""
        seconds = LAST_SECONDS if self._ending[0] else _LEFT_SECONDS
        self._is_over.set()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for sender in self._senders:
            sender.is_abandoned.set()
            if self._ending[0] and not sender.is_done:
                sender.note(sender.describe_unsent(sender.problem or f"after {seconds:g} s"))
        self._senders, self._threads, self._note = [], [], None

    def _send(self, sender: Sender) -> None:
        """Send to a tracker until the run is over, and then how it ended."""
        wait = 0.0
        with suppress(HvdtrainError, Abandoned):
            while not self._is_over.wait(wait):
                is_sent = sender.succeeds(sender.send)
                wait = _POLL_SECONDS if is_sent else min(_LONGEST_WAIT, max(_POLL_SECONDS, 2 * wait))
            for wait in (0.0, *(_LAST_ATTEMPTS - 1) * [_POLL_SECONDS]):
                if sender.is_abandoned.wait(wait) or sender.succeeds(partial(sender.end, *self._ending)):
                    return

    def _say(self, text: str) -> None:
        if (note := self._note) is not None:  # the report is not closed
            note(text)


def describe_error(error: Exception) -> str:
    """Return an error of a tracker's library in one line, without passwords."""
    text = f"{error.problem}. {error.remedy}".rstrip(". ") if isinstance(error, HvdtrainError) else str(error)
    text = without_password(" ".join(text.split())) or type(error).__name__
    if found := _NO_ANSWER.search(text):
        return f"{found[1]}:{found[2]} does not answer"
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."
