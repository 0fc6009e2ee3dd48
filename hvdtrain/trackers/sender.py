"""Sending what a run has written to trackers: by threads of rank 0 while it trains, or by a command later.

The log of the run is the queue. In the folder ``tracking`` next to it lie the name that the run has among
trackers and, for each tracker, how many lines of the log it was sent.
"""

import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, NonNegativeInt

from hvdtrain.callbacks import Callback, RunContext, Summary
from hvdtrain.checkpoints import verification
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, copied
from hvdtrain.config.values import TRACKERS
from hvdtrain.errors import EnvironmentFault, HvdtrainError
from hvdtrain.reporting.jsonl import LONGEST_LINE, write_json
from hvdtrain.reporting.report import METRICS_FILE
from hvdtrain.reporting.stored_runs import CONFIG_FILE, describe_broken, read_config
from hvdtrain.storage.files import check_link, open_regular, read_regular
from hvdtrain.trackers.services import CLIENTS, TrackedRun, Tracker, row_of, without_password

FOLDER, ID_FILE = "tracking", "id.json"
LAST_SECONDS = 10.0  # for what is not sent when the job is over
_LEFT_SECONDS = 2.0  # likewise if another worker continues the run
_POLL_SECONDS, _LONGEST_WAIT = 1.0, 30.0  # between attempts, which are fewer while a tracker does not answer
_LAST_ATTEMPTS = 3
_LINES = 150  # in one request
_MAX_BYTES = 1 << 22
_LONGEST_ERROR = 200  # characters
_NO_ANSWER = re.compile(r"Pool\(host='([^']*)', port=(\d+)\)")  # what the library requests says
_NOT_SENT = ("run_dir", "resume", "track", "track_checkpoints")

_Model = TypeVar("_Model", bound=BaseModel)


class _Sent(BaseModel):
    """What ``mlflow.json`` holds: where the run is at the tracker, and how many lines it was sent."""

    place: str = ""
    lines: NonNegativeInt = 0


def read_id(run_dir: Path) -> str | None:
    """Return the name that trackers know a run by; None if it has none, or none that can be read."""
    return run.id if (run := _read(run_dir / FOLDER / ID_FILE, TrackedRun)) else None


def note_start(run_dir: Path, run: TrackedRun) -> None:
    """Keep the name of a run in its directory, and what is known of the job that starts."""
    check_link(run_dir / FOLDER, run_dir)
    (run_dir / FOLDER).mkdir(exist_ok=True)
    write_json(run_dir / FOLDER / ID_FILE, run.model_dump())


def read_tracked_run(run_dir: Path) -> TrackedRun:
    """Return what trackers are sent of a run besides its log; a run that was never tracked gets a name."""
    if (run := _read(run_dir / FOLDER / ID_FILE, TrackedRun)) is None:
        began_seconds = (run_dir / CONFIG_FILE).stat().st_mtime
        run = TrackedRun(id=uuid.uuid4().hex, began_seconds=began_seconds)
        note_start(run_dir, run)
    config, _, problem = read_config(run_dir)
    config = config or {"config_error": problem}
    fields = {str(name): value for name, value in config.items() if name not in _NOT_SENT}
    return run.model_copy(update={"folder": run_dir, "config": fields})


def _read(path: Path, model: type[_Model]) -> _Model | None:
    """Return what a file holds; None if there is none, or none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        return model.model_validate_json(read_regular(path, _MAX_BYTES))
    return None


class Abandoned(Exception):
    """Ends a thread whose run another process may send."""


class Sender:
    """Sends a run to one tracker, from where the last sender of this run directory ended.

    Its methods raise whatever the tracker's library raises; what was sent until then is noted. ``note`` shows
    a line of text to the user, in any thread.
    """

    def __init__(self, run_dir: Path, name: str, note: Callable[[str], None]) -> None:
        self.title, self.place = TRACKERS[name].title, ""  # where the run is at the tracker, when it is known
        self.note: Callable[[str], None] = lambda text: note(f"{self.title}: {text}")
        self.checkpoint: Path | None = None  # the newest one that is to be sent
        self.is_abandoned = (
            threading.Event()
        )  # nothing more may be sent or written: another process may do it
        self._run_dir, self._name, self._identity = run_dir, name, _identity_of(run_dir)
        self._sent_checkpoint: Path | None = None
        self._log, self._path = run_dir / METRICS_FILE, run_dir / FOLDER / f"{name}.json"
        self._tracker: Tracker | None = None
        self._run: TrackedRun | None = None  # while it is open
        self.is_over, self.is_done = threading.Event(), False  # whether training is, and all is sent
        self.ending = ("", "")  # how the run ended, before it is over
        self.problem, self._shown_place = "", ""  # why the last attempt failed
        self._sent = _read(self._path, _Sent) or _Sent()
        self._offset = 0
        lines = self._unsent(self._sent.lines)  # fewer, if the log was cut back
        self._sent.lines, self._offset = len(lines), sum(map(len, lines))

    def send(self) -> None:
        """Send all lines that there are now, and the checkpoint."""
        self._send_lines()
        self._send_checkpoint()

    def end(self, status: str, error: str = "") -> None:
        """Send what is left, and how the run ended: see ``Tracker.end``."""
        tracker, _ = self._send_lines()
        try:
            self._send_checkpoint()
        except Abandoned:
            raise
        except Exception as refusal:  # the end of the run is not kept back for it
            self.note(f"{self.checkpoint} is not sent: {describe_error(refusal)}")
        self._check()
        tracker.end(status, error)
        self._run = None

    def run(self) -> None:
        """Send until the run is over, and then how it ended; an error that is the user's ends it."""
        wait = 0.0
        with suppress(HvdtrainError, Abandoned):
            while not self.is_over.wait(wait):
                is_sent = self._try(self.send)
                wait = _POLL_SECONDS if is_sent else min(_LONGEST_WAIT, max(_POLL_SECONDS, 2 * wait))
            for _ in range(_LAST_ATTEMPTS if self.ending[0] else 1):  # another worker sends what is left
                if self._try(lambda: self.end(*self.ending)):
                    self.is_done = True
                    return
                time.sleep(_POLL_SECONDS)

    def _try(self, step: Callable[[], None]) -> bool:
        """Do a step of sending; note when the tracker fails, and when it answers."""
        before = self.problem
        try:
            step()
            self.problem = ""
        except Abandoned:
            raise
        except Exception as error:
            self.problem = describe_error(error)
            if not before:
                self.note(f"{self.problem}; training continues")
            if isinstance(error, HvdtrainError):  # until the user changes something
                raise
            return False
        if before:
            self.note("it answers again, and has all that was logged meanwhile")
        if self._shown_place != self.place:
            self._shown_place = self.place
            self.note(f"this run is {self.place}")
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
        """Check that this process may still send the run, and that its directory is still where it was."""
        if self.is_abandoned.is_set() or _identity_of(self._run_dir) != self._identity:
            raise Abandoned

    def _opened(self) -> tuple[Tracker, TrackedRun]:
        self._check()
        if self._tracker is None:
            self._tracker = CLIENTS[self._name](self.note)
        if self._run is None:
            run = read_tracked_run(self._run_dir)
            self.place = self._tracker.open(run)
            if self.place != self._sent.place:  # another server, or the run was deleted there
                self._sent, self._offset = _Sent(place=self.place), 0
            self._run = run
        return self._tracker, self._run

    def _send_lines(self) -> tuple[Tracker, TrackedRun]:
        tracker, run = self._opened()
        broken: list[int] = []
        while lines := self._unsent(_LINES):
            rows = [row_of(line, run.began_seconds) for line in lines]
            broken += [number for number, row in enumerate(rows, self._sent.lines + 1) if row is None]
            self._check()
            tracker.send([row for row in rows if row is not None])
            self._check()
            self._sent.lines += len(lines)
            self._offset += sum(map(len, lines))
            write_json(self._path, self._sent.model_dump())
        if broken:
            self.note(describe_broken(broken))
        return tracker, run

    def _send_checkpoint(self) -> None:
        newest = self.checkpoint  # which the training thread sets
        if newest == self._sent_checkpoint or newest is None:
            return
        with copied(newest, self._path.parent, self._name) as folder:
            if folder is not None:  # it was not removed meanwhile
                try:
                    verification.verify(folder)
                except (CorruptCheckpoint, EnvironmentFault) as error:
                    self.note(f"{newest.name} is not sent: {describe_error(error)}")
                else:
                    self._opened()[0].checkpoint(folder)
        self._sent_checkpoint = newest

    def _unsent(self, limit: int) -> list[bytes]:
        """Return the next lines of the log that were not sent, at most a number of them."""
        found: list[bytes] = []
        with suppress(FileNotFoundError), open_regular(self._log, follow=False) as file:
            file.seek(self._offset)
            while len(found) < limit and (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
                found.append(line)
        return found


def _identity_of(run_dir: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        return (found := run_dir.stat()).st_dev, found.st_ino
    return None


class JobTracking(Callback):
    """The built-in callback that has a run sent to trackers. Rank 0 alone has it.

    A thread for each tracker does it. The thread that trains waits for none but some seconds at the end.
    ``facts`` are what is known of the job, not in its config: hosts, commit, what differs from before.
    """

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
        # daemons: a process ends although a server is awaited
        self._threads = [threading.Thread(target=sender.run, daemon=True) for sender in self._senders]
        self._note: Callable[[str], None] | None = None

    def on_start(self, context: RunContext) -> None:
        """Note that the job starts, and start the threads."""
        self._note = context.note
        began = round(time.time() - context.seconds(), 3)
        facts = {"step": context.steps_done, "workers": context.workers, **self._facts}
        try:
            note_start(self._run_dir, TrackedRun(id=self._tracking_id, began_seconds=began, facts=facts))
        except OSError as error:
            self._senders, self._threads = [], []
            self._say(f"trackers: nothing of this run is sent: {error}; training continues")
        for thread in self._threads:
            thread.start()

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Have the checkpoint sent; it takes the place of one that was not sent yet."""
        for sender in self._senders if self._with_checkpoints else ():
            sender.checkpoint = path

    def on_end(self, summary: Summary) -> None:
        """Note how the run ended; without this, another worker continues it."""
        for sender in self._senders:
            sender.ending = summary.status, summary.error or ""

    def close(self) -> None:
        """Wait some seconds until all is sent, and say what is not."""
        begun = time.monotonic()
        for sender in self._senders:
            sender.is_over.set()
        for sender, thread in zip(self._senders, self._threads, strict=True):
            seconds = LAST_SECONDS if sender.ending[0] else _LEFT_SECONDS
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, begun + seconds - time.monotonic()))
            sender.is_abandoned.set()
            if sender.ending[0] and not sender.is_done:
                sender.note(sender.describe_unsent(sender.problem or f"after {seconds:g} s"))
        self._senders, self._threads, self._note = [], [], None

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
