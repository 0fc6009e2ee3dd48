"""The process beside rank 0 that keeps a run directory at a URL as its working copy is.

All that is read from and written to the store goes through it, so that no client and no event loop of a store
lives beside Horovod, and what is written last goes up although the job was killed. Its standard input has
the job's messages; if the job was killed, the input ends. Its standard output has what it tells the job.
"""

import argparse
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
from hvdtrain.checkpoints.remote.claim import (
    BEAT_SECONDS,
    BEGUN,
    FAILED,
    FLUSH,
    FLUSHED,
    NOTE,
    OVER,
    START,
    STATE,
    Outbox,
    UploadState,
    decode,
)
from hvdtrain.checkpoints.remote.uploader import Retention, Uploader
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import HvdtrainError
from hvdtrain.host.processes import stay_out_of_the_way
from hvdtrain.storage.urls import TRAFFIC, Patience, StoreError, shown

KILLED_SECONDS = 60.0  # for what is left if the job was killed
_POLL_SECONDS = 0.5
_TELL_SECONDS = 0.5
_LONGEST_WAIT = 30.0  # between attempts while the store does not answer
_LAST_WAIT = 2.0  # likewise while the job waits
_RELEASE_SECONDS = 5.0
_PATIENCE = Patience(stall_seconds=60.0, tries=3)


def main(words: list[str]) -> None:
    """Keep a run directory at a URL as its working copy is, until the job is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", default="")
    parser.add_argument("--keep-last", type=int)
    parser.add_argument("--keep-best")
    parser.add_argument("--spare", action="append", default=[])
    options = parser.parse_args(words)
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print
    stay_out_of_the_way()
    goal = MetricGoal.parse(options.keep_best) if options.keep_best else None
    retention = Retention(options.keep_last, goal, tuple(options.spare))
    service = UploadService(options.url, options.folder, retention, Outbox(output))
    code = service.run(options.resume)
    sys.stderr.flush()
    os._exit(code)  # a client's event loop may still wait for a store that does not answer


class UploadService:
    """Uploads what a job writes until it is over.

    Args:
        url: the run directory.
        folder: its working copy.
        retention: which checkpoints are kept in the store.
        outbox: where the job hears of it.
        job: a descriptor from which the job is heard.
    """

    def __init__(self, url: str, folder: Path, retention: Retention, outbox: Outbox, job: int = 0) -> None:
        self._url, self._folder, self._retention = url, folder, retention
        self._outbox, self._job = outbox, job
        self._sending = threading.Lock()
        self._heard: Queue[tuple[str, Any]] = Queue()
        self._is_over = threading.Event()
        self._problem, self._failing_since, self._failures = "", 0.0, 0
        self._told: UploadState | None = None
        self._uploader: Uploader | None = None
        self._flush: int | None = None
        self._start: list[int | None] = []  # with which step to begin to upload, until that is done
        self._has_begun = self._has_started = self._is_ending = False

    def run(self, resume: str) -> int:
        """Begin, upload while the job runs, then what is left; return the exit code."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._tell_state, daemon=True).start()
        try:
            self._uploader = uploader = Uploader(
                self._url, self._folder, self._retention, self._note, _PATIENCE
            )
            threading.Thread(target=self._beat, daemon=True).start()
            begun = uploader.begin(resume)
        except Exception as error:  # clients of stores have errors of their own
            self._is_over.set()
            self._release()
            self._send(FAILED, problem_of(error, self._url))
            return 1
        self._has_begun = True
        self._send(BEGUN, asdict(begun))
        until = self._serve(uploader)
        return self._end(uploader, until)

    def _serve(self, uploader: Uploader) -> float:
        """Upload until the job is over; return until when what is left may be uploaded, in monotonic time."""
        due = 0.0
        while True:
            with suppress(Empty):
                kind, value = self._heard.get(timeout=_POLL_SECONDS)
                if kind == OVER:
                    return float(value)
                if kind == START:
                    self._has_started, self._start = True, [value]
                elif kind == FLUSH:
                    self._flush, due = int(value), 0.0
                    TRAFFIC.begin_anew()
                continue
            if not self._has_started or time.monotonic() < due:
                continue
            self._try(uploader)
            wait = min(_LAST_WAIT if self._flush is not None else _LONGEST_WAIT, 2.0**self._failures)
            due = time.monotonic() + (wait if self._failures else 0.0)

    def _try(self, uploader: Uploader) -> bool:
        """Upload what there is; tell the user when the store fails, and when it answers again."""
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
            self._note(f"{shown(self._url)}: it answers again, and has all that was written meanwhile")
        self._problem, self._failures = "", 0
        if flush is not None and not uploader.unfinished():
            self._flush = None
            self._send_state()
            self._send(FLUSHED, flush)
        return True

    def _note_problem(self, uploader: Uploader, error: Exception) -> None:
        reason = " ".join(str(shown(getattr(error, "problem", "") or error)).split())
        if isinstance(error, OSError) and not isinstance(error, StoreError) and error.filename is None:
            reason = f"{self._folder}: {error.strerror or reason}"  # such as a full disk, of the working copy
        if not self._problem and not uploader.claim.lost:
            self._failing_since = time.monotonic()
            self._note(
                f"{reason}; training continues, what it writes stays in {self._folder} until the store has it"
            )
        self._problem = reason

    def _end(self, uploader: Uploader, until: float) -> int:
        """Upload what is left until then, and let other jobs have the run directory."""
        if self._has_started:
            with suppress(OSError):
                if not uploader.is_done():
                    uploader.claim.mark_end()
            while not uploader.claim.lost:
                self._flush = self._flush or 0
                if self._try(uploader) and not uploader.unfinished():
                    break
                if time.monotonic() > until:
                    break
                time.sleep(min(_LAST_WAIT, 0.2 * 2.0**self._failures))
        is_done = not self._has_started or uploader.is_done()
        self._is_over.set()
        self._release()
        return 0 if is_done else 1

    def _end_at(self, until: float) -> None:
        time.sleep(max(0.0, until - time.monotonic()))
        os._exit(1)

    def _release(self) -> None:
        """Let other jobs have the run directory, if the store answers."""
        if self._uploader is not None:
            with suppress(OSError):
                self._uploader.close()

    def _listen(self) -> None:
        left = b""
        while found := os.read(self._job, 65536):
            *lines, left = (left + found).split(b"\n")
            for line in lines:
                with suppress(ValueError):
                    kind, value = decode(line)
                    if kind == OVER:
                        self._end_within(float(value))
                    else:
                        self._heard.put((kind, value))
        if self._is_over.is_set():
            return
        self._end_within(KILLED_SECONDS)
        if not self._has_begun:  # nobody waits for what is being read
            threading.Thread(target=self._end_at, args=(time.monotonic() + _RELEASE_SECONDS,)).start()
            self._release()

    def _end_within(self, seconds: float) -> None:
        """Have what is left uploaded for so many seconds, also if a request never ends."""
        if self._is_ending:
            return
        self._is_ending = True
        until = time.monotonic() + seconds
        self._heard.put((OVER, until))
        threading.Thread(target=self._end_at, args=(until + _RELEASE_SECONDS,), daemon=True).start()

    def _beat(self) -> None:
        """Give signs of life until the job is over; end at once if another job has the run directory."""
        assert self._uploader is not None
        while not self._is_over.wait(BEAT_SECONDS):
            with suppress(StoreError):
                self._uploader.claim.beat()
            if self._uploader.claim.lost:  # so that no upload under way is finished over the successor's
                self._send_state()
                os._exit(1)

    def _tell_state(self) -> None:
        while not self._is_over.wait(_TELL_SECONDS):
            self._send_state()

    def _send_state(self) -> None:
        uploader = self._uploader
        since = time.monotonic() - self._failing_since if self._problem else 0.0
        state = UploadState(
            tuple(sorted(uploader.whole.copy())) if uploader is not None else (),
            self._problem,
            uploader.claim.lost if uploader is not None else "",
            TRAFFIC.moved_bytes,
            round(since),
        )
        if state != self._told:
            self._told = state
            self._send(STATE, asdict(state))
        with self._sending:
            self._outbox.flush()

    def _note(self, text: str) -> None:
        self._send(NOTE, text)

    def _send(self, kind: str, value: Any) -> None:
        with self._sending:
            self._outbox.send(kind, value)


if __name__ == "__main__":
    main(sys.argv[1:])
