"""The process on the host of rank 0 that keeps a run directory at a URL as its working copy is.

All that is read from and written to the store goes through it, so that no client and no event loop of a store
lives in Horovod's process, and what is written last goes up although the job was killed. Its input has the
job's messages; if the job was killed, it ends. Its output has a line for each change.
"""

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from hvdtrain.checkpoints.remote.begin import problem_of
from hvdtrain.checkpoints.remote.claim import BEAT_SECONDS
from hvdtrain.checkpoints.remote.uploader import Retention, Uploader
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import HvdtrainError
from hvdtrain.host.processes import stay_out_of_the_way
from hvdtrain.storage.urls import TRAFFIC, Patience, StoreError, shown

START = "start"  # steps done, or null: the job changes the run from now on
FLUSH = "flush"  # a number: upload all that is there, then report it
OVER = "over"  # seconds: the job has ended; upload what is left, for so long
KILLED_SECONDS = 60.0  # for what is left if the job was killed
_POLL_SECONDS = 0.5
_LONGEST_WAIT = 30.0  # between attempts while the store does not answer
_LAST_WAIT = 2.0  # likewise while the job waits
_RELEASE_SECONDS = 5.0
_PATIENCE = Patience(stall_seconds=60.0, tries=3)


def main(
    url: str, folder: str, resume: str, *, keep_last: int | None, keep_best: str, spared: list[str]
) -> None:
    """Keep a run directory at a URL as its working copy is, until the job is over."""
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print
    stay_out_of_the_way()
    retention = Retention(keep_last, MetricGoal.parse(keep_best) if keep_best else None, spared)
    code = UploadService(url, Path(folder), retention, output).run(resume)
    sys.stderr.flush()
    os._exit(code)  # a client's event loop may still wait for a store that does not answer


class UploadService:
    """Uploads what a job writes until it is over; reports go to a descriptor, which is made non-blocking."""

    def __init__(self, url: str, folder: Path, retention: Retention, output: int) -> None:
        os.set_blocking(output, False)
        self._url, self._folder, self._retention, self._output = url, folder, retention, output
        self._reporting = threading.Lock()
        self._messages: Queue[tuple[str, Any]] = Queue()
        self._is_over = threading.Event()
        self._problem, self._failing_since, self._failures = "", 0.0, 0
        self._state: dict[str, Any] = {}  # as last reported
        self._line = b""  # what the job has not read of it
        self._notes: list[str] = []
        self._news: dict[str, Any] = {}  # reported once: begun, failed, flushed
        self._uploader: Uploader | None = None
        self._flush: int | None = None
        self._start: list[int | None] = []  # with which step to begin to upload, until that is done
        self._has_begun = self._has_started = self._is_ending = False

    def run(self, resume: str) -> int:
        """Begin, upload while the job runs, then what is left; return the exit code."""
        for target in (self._listen, self._report_changes):
            threading.Thread(target=target, daemon=True).start()
        try:
            self._uploader = uploader = Uploader(
                self._url, self._folder, self._retention, self._notes.append, _PATIENCE
            )
            threading.Thread(target=self._beat, args=(uploader,), daemon=True).start()
            begun = uploader.begin(resume)
        except Exception as error:  # clients of stores have errors of their own
            self._is_over.set()
            self._release()
            self._report(failed=problem_of(error, self._url))
            return 1
        self._has_begun = True
        self._report(begun=asdict(begun))
        is_done = self._end(uploader, self._serve(uploader))
        self._is_over.set()
        self._release()
        self._report()
        return 0 if is_done else 1

    def _serve(self, uploader: Uploader) -> float:
        """Upload until the job is over; return until when what is left may be uploaded, in monotonic time."""
        due = 0.0
        while True:
            with suppress(Empty):
                kind, value = self._messages.get(timeout=_POLL_SECONDS)
                if kind == OVER:
                    return float(value)
                if kind == START:
                    self._has_started, self._start = True, [value]
                elif kind == FLUSH:
                    self._flush, due = int(value), 0.0
                    TRAFFIC.begin_anew()
                continue
            if self._has_started and time.monotonic() >= due:
                is_done = self._try(uploader)
                wait = min(_LAST_WAIT if self._flush is not None else _LONGEST_WAIT, 2.0**self._failures)
                due = time.monotonic() + (0.0 if is_done else wait)

    def _try(self, uploader: Uploader) -> bool:
        """Upload what there is; note when the store fails, and when it answers again."""
        flush = self._flush
        try:
            if self._start:
                uploader.start(*self._start)
                self._start = []
            uploader.round(is_last=flush is not None)
        except (HvdtrainError, OSError) as error:
            self._failures += 1
            self._note_problem(uploader, error)
            return False
        if self._problem:
            text = "it answers again, and has all that was written meanwhile"
            self._notes.append(f"{shown(self._url)}: {text}")
        self._problem, self._failures = "", 0
        if flush is not None and not uploader.unfinished():
            self._flush = None
            self._report(flushed=flush)
        return True

    def _note_problem(self, uploader: Uploader, error: Exception) -> None:
        reason = " ".join(str(shown(getattr(error, "problem", "") or error)).split())
        if isinstance(error, OSError) and not isinstance(error, StoreError) and error.filename is None:
            reason = f"{self._folder}: {error.strerror or reason}"  # such as a full disk, of the working copy
        if not self._problem and not uploader.claim.lost:
            self._failing_since = time.monotonic()
            stays = f"what it writes stays in {self._folder} until the store has it"
            self._notes.append(f"{reason}; training continues, {stays}")
        self._problem = reason

    def _end(self, uploader: Uploader, until: float) -> bool:
        """Upload what is left until then; return whether the store has all of it."""
        if not self._has_started:
            return True
        with suppress(OSError):
            if not uploader.is_done():
                uploader.claim.update(is_ending=True)
        self._flush = self._flush or 0
        while not uploader.claim.lost:
            if (self._try(uploader) and not uploader.unfinished()) or time.monotonic() > until:
                break
            self._flush = self._flush or 0
            time.sleep(min(_LAST_WAIT, 0.2 * 2.0**self._failures))
        return uploader.is_done()

    def _release(self) -> None:
        """Let other jobs have the run directory, if the store answers."""
        if self._uploader is not None:
            with suppress(OSError):
                self._uploader.close()

    def _listen(self) -> None:
        with open(0, "rb", closefd=False) as job:
            for line in job:
                with suppress(ValueError):
                    kind, value = json.loads(line)
                    if kind == OVER:
                        self._end_within(float(value))
                    else:
                        self._messages.put((kind, value))
        if self._is_over.is_set():
            return
        self._end_within(KILLED_SECONDS)
        if not self._has_begun:  # nobody waits for what is being read
            self._end_at(time.monotonic() + _RELEASE_SECONDS)
            self._release()

    def _end_within(self, seconds: float) -> None:
        """Have what is left uploaded for so many seconds, also if a request never ends."""
        if not self._is_ending:
            self._is_ending = True
            until = time.monotonic() + seconds
            self._messages.put((OVER, until))
            self._end_at(until + _RELEASE_SECONDS)

    def _end_at(self, until: float) -> None:
        timer = threading.Timer(until - time.monotonic(), os._exit, [1])
        timer.daemon = True
        timer.start()

    def _beat(self, uploader: Uploader) -> None:
        """Give signs of life until the job is over; end at once if another job has the run directory."""
        while not self._is_over.wait(BEAT_SECONDS):
            with suppress(StoreError):
                uploader.claim.update()
            if uploader.claim.lost:  # so that no upload under way is finished over the successor's
                self._report()
                os._exit(1)

    def _report_changes(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            self._report()

    def _report(self, **news: Any) -> None:
        """Send how the uploads are, if that has changed; never waits for the job to read it."""
        uploader = self._uploader
        state = {
            "whole": sorted(uploader.whole.copy()) if uploader is not None else [],
            "problem": self._problem,
            "lost": uploader.claim.lost if uploader is not None else "",
            "moved_bytes": TRAFFIC.moved_bytes,
            "failing_seconds": round(time.monotonic() - self._failing_since) if self._problem else 0,
        }
        with self._reporting, suppress(OSError):  # the job is gone, or has not read the last ones
            self._news |= news
            for _ in range(2):  # what is left of the last report, then this one
                while self._line:
                    self._line = self._line[os.write(self._output, self._line) :]
                if not self._notes and not self._news and state == self._state:
                    break
                notes = self._notes[:]
                del self._notes[: len(notes)]
                self._line = json.dumps({"state": state, "notes": notes, **self._news}).encode() + b"\n"
                self._state, self._news = state, {}


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
