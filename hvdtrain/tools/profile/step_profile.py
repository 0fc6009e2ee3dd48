"""Recording some steps, on all workers together; rank 0 writes the trace and the costs."""

import gzip
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hvdtrain.backends.hooks import LoopHook
from hvdtrain.backends.recording import Busy, Operations, StepRecorder
from hvdtrain.reporting.jsonl import write_json, write_parts
from hvdtrain.session import Session
from hvdtrain.storage.files import check_link
from hvdtrain.tools.profile.costs import build_trace, find_costs, lines_of
from hvdtrain.tools.profile.recording import Listener, Recording, clock_id, measure_offset
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import waiting_for_rank_zero

_MOST_OPERATIONS = 500_000  # of all workers together: half a gigabyte while the trace is made
_MOST_OF_ONE = 100_000
_NOTED_MS = 1.0


class StepProfile(LoopHook):
    """Records the steps that the config requests, once in a job.

    What cannot be recorded or written is noted, and training continues: no error of a profiler or of a disk
    leaves this class.
    """

    def __init__(self, session: Session) -> None:
        window = session.config.profile
        assert window is not None  # the config requests it
        self._session, self._window, self._workers = session, window, session.backend.workers
        self._is_over = False
        self._recorder: StepRecorder | None = None
        self._recording: Recording | None = None  # while steps are recorded
        self._listener: Listener | None = None

    def on_workers(self) -> None:
        """Collective. Agree on whether the recording is over; a worker that joins has none on its own."""
        self._is_over = any(self._workers.allgather_object(self._is_over))

    def before_step(self, step: int) -> None:
        """Collective. Begin or end the recording if it is time to."""
        is_due = step >= self._window.first if self._recording is None else step > self._window.last
        if self._is_over or not is_due or self._session.plan().is_done(self._session.state.progress):
            return
        with self._session.pause_timer():
            if self._recording is not None:
                self._finish(self._recording)
            elif step > self._window.last:
                self._nothing(f"training resumed at step {step:,}")
            else:
                self._begin(step)

    def after_steps(self, step: int) -> None:
        """Collective if steps are being recorded. End the recording.

        Whoever stops a job may not wait until the trace is written, so the checkpoint is waited for first.
        """
        if self._is_over:
            return
        if self._recording is None:
            self._nothing(f"training ended at step {step:,}")
            return
        if self._session.stopped:
            with waiting_for_rank_zero(self._workers, "writing the last checkpoint"):
                self._session.services.saver.finish()
        self._finish(self._recording)

    def __exit__(self, *exception: Any) -> None:
        """Write what rank 0 recorded so far, if an exception ended the steps. Local: no collective."""
        if exception[0] is None or (recording := self._recording) is None:
            return
        self._stop_listening(recording)
        with ACTIVITY.during("writing the profile"):
            self._stop(recording)
            self._recording = None
            if recording.begin_ns:
                self._write([recording])

    def _nothing(self, why: str) -> None:
        self._is_over, window = True, self._window.describe()
        self._session.services.report.note(f"profile: nothing was recorded of {window}: {why}")

    def _begin(self, step: int) -> None:
        """Collective. Begin to record."""
        workers = self._workers
        if step > self._window.first:
            note = f"profile: recording begins with step {step:,}: training resumed there"
            self._session.services.report.note(note)
        with ACTIVITY.during("starting the profiler before step", step):
            clock = measure_offset(workers, clock_id())
            self._recording = recording = Recording(workers.rank, workers.host, clock=clock)
            self._recorder = recorder = self._session.backend.recorder()
            self._try("the framework's profiler did not start", recorder.start)
            if workers.rank == 0 and workers.size > 1:
                self._try("Horovod's timeline was not started", recorder.timeline.start)
            workers.barrier()  # starting a profiler takes one worker longer than another
        recording.begin_ns = time.time_ns()
        self._listener = ACTIVITY.listener = Listener(recording, self._busy)

    def _finish(self, recording: Recording) -> None:
        """Collective. End the recording, and write the trace and the costs of all workers."""
        workers = self._workers
        self._stop_listening(recording)
        with ACTIVITY.during("writing the profile after step", self._window.last):
            self._stop(recording)
            recording.clock = recording.clock.joined(measure_offset(workers, clock_id()))
            found = [recording]
            # an error of one worker must not leave it: the others wait for this one in a collective
            sent = self._try("it cannot be sent", recording.to_bytes) if workers.rank else b""
            for content in workers.allgather_object(sent or b"")[1:]:
                with suppress(ValueError):  # it is missing
                    found += [Recording.from_bytes(content)] if workers.rank == 0 else []
            with waiting_for_rank_zero(workers, "writing the profile"):
                self._write(found)
        self._recording = None

    def _stop_listening(self, recording: Recording) -> None:
        """End what the training thread's activities add to the recording. Local: no collective."""
        ACTIVITY.listener, listener, self._listener = None, self._listener, None
        if listener is None:
            return
        self._try("the last step's times are not known", listener.close)
        recording.end_ns = time.time_ns()
        if recording.phases:
            recording.begin_ns = recording.phases[0].begin_ns

    def _stop(self, recording: Recording) -> None:
        """Stop what records, and read it, which may take long. Local: no collective."""
        self._is_over, recorder, self._recorder = True, self._recorder, None
        if recorder is None:
            return
        recording.timeline = self._try("Horovod's timeline cannot be read", recorder.timeline.stop) or []

        def read() -> bool:
            recording.operations = recorder.stop()
            recording.cut_operations(min(_MOST_OF_ONE, max(1, _MOST_OPERATIONS // self._workers.size)))
            return True

        if not self._try("what the framework's profiler recorded cannot be read", read):
            recording.operations = Operations()

    def _write(self, recordings: Sequence[Recording]) -> None:
        """Write the trace and the costs on rank 0, and show the costs. Nothing here ends the job."""
        session = self._session
        if self._workers.rank:
            return
        try:
            costs = find_costs(recordings)
            problems: list[str] = costs["problems"]
            if left := self._workers.size - len(recordings):
                problems.append(f"the recordings of {left} of {self._workers.size} workers are missing")
            if (apart := costs["clock_uncertainty_ms"]) > _NOTED_MS:
                problems.append(f"times of different hosts may be {apart:.1f} ms apart")
            shown, folder = lines_of(costs), session.services.run_dir / "profile"
            try:
                if session.services.lost_lease():
                    raise OSError("this worker may no longer write files")
                check_link(folder, session.services.run_dir)
                folder.mkdir(exist_ok=True)
                text = json.dumps(build_trace(recordings), separators=(",", ":"))
                write_parts(folder / "trace.json.gz", [gzip.compress(text.encode(), compresslevel=5)])
                write_json(folder / "costs.json", costs)
                shown.append(f"  {folder / 'trace.json.gz'} opens in https://ui.perfetto.dev")
            except OSError as error:
                problems.append(f"it cannot be written to {folder}: {error.strerror or error}")
            session.services.report.say("\n".join(shown))
            for problem in problems:
                session.services.report.note(f"profile: {problem}")
        except Exception as error:
            session.services.report.note(f"profile: the recording cannot be evaluated: {error!r}")

    def _busy(self) -> Busy | None:
        """Return what the step clock says; None if that fails, which must not end the training."""
        with suppress(Exception):
            return None if self._recorder is None else self._recorder.busy()
        return None

    def _try(self, problem: str, work: Callable[[], Any]) -> Any:
        """Do what may fail, and keep in the recording that it did."""
        try:
            return work()
        except Exception as error:
            text = str(error).strip().splitlines()
            assert self._recording is not None  # it began
            why = text[0] if text else type(error).__name__
            self._recording.problems.append(f"rank {self._workers.rank}: {problem}: {why}")
            return None
