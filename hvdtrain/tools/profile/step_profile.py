"""Recording some steps: starting and stopping what records, on all workers together."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hvdtrain.backends.hooks import LoopHook
from hvdtrain.backends.recording import Busy, Operations, StepRecorder
from hvdtrain.session import Session
from hvdtrain.tools.profile.gathering import Gathering
from hvdtrain.tools.profile.recording import Listener, Recording, clock_id, measure_offset
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import waiting_for_rank_zero

_MOST_OPERATIONS = 500_000  # of all workers together: half a gigabyte while the trace is made
_MOST_OF_ONE = 100_000


class StepProfile(LoopHook):
    """Records the steps that the config asks for, once in a job.

    What cannot be recorded or written is noted, and training continues: no error of a profiler or of a disk
    leaves this class.

    Args:
        session: the run. Its report and its directory may change with the workers.
    """

    def __init__(self, session: Session) -> None:
        window = session.config.profile
        assert window is not None  # the config asks for it
        self._session, self._window, self._workers = session, window, session.backend.workers
        self._gathering = Gathering(
            self._workers,
            lambda: session.run_dir / "profile",
            report=lambda: session.report,
            may_write=lambda: not session.lost_lease(),
        )
        self._is_over = False
        self._recorder: StepRecorder | None = None
        self._recording: Recording | None = None
        self._listener: Listener | None = None
        self._is_recording = False

    def on_workers(self) -> None:
        """Collective. Agree on whether the recording is over; a worker that joins has none on its own."""
        self._is_over = any(self._workers.allgather_object(self._is_over))

    def before_step(self, step: int) -> None:
        """Collective. Begin or end the recording if it is time to."""
        is_due = step > self._window.last if self._is_recording else step >= self._window.first
        if self._is_over or not is_due or self._session.plan().is_done(self._session.state.progress):
            return
        with self._session.pause_timer(), self._abandoned_on_error():
            if self._is_recording:
                self._finish()
            elif step > self._window.last:
                self._nothing(f"training resumed at step {step:,}")
            else:
                self._begin(step)

    def after_steps(self, step: int) -> None:
        """Collective if steps are being recorded. End the recording.

        Whoever asks to stop may not wait until the trace is written, so the checkpoint is waited for first.
        """
        if self._is_over:
            return
        if not self._is_recording:
            self._nothing(f"training ended at step {step:,}")
            return
        with self._abandoned_on_error():
            if self._session.stopped:
                with waiting_for_rank_zero(self._workers, "writing the last checkpoint"):
                    self._session.saver.finish()
            self._finish()

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    def __exit__(self, *exception: object) -> None:
        """Write what was recorded so far, if an exception ended the steps."""
        if exception[0] is not None:
            self._abandon()

    def _nothing(self, why: str) -> None:
        self._is_over = True
        self._session.report.note(f"profile: nothing was recorded of {self._window.describe()}: {why}")

    def _begin(self, step: int) -> None:
        """Collective. Begin to record."""
        workers, window = self._workers, self._window
        if step > window.first:
            self._session.report.note(f"profile: recording begins with step {step:,}: training resumed there")
        with ACTIVITY.during("starting the profiler before step", step):
            token = workers.broadcast_object(secrets.token_hex(8) if workers.rank == 0 else None)
            recording = Recording(workers.rank, workers.host, token)
            recording.before = recording.after = measure_offset(workers, clock_id())
            self._recording = recording
            self._recorder = self._session.backend.recorder()
            self._is_recording = True
            self._try("the framework's profiler did not start", self._recorder.start)
            if workers.rank == 0 and workers.size > 1:
                self._try("Horovod's timeline was not started", self._recorder.timeline.start)
            workers.barrier()  # starting a profiler takes one worker longer than another
        recording.begin_ns = time.time_ns()
        self._listener = ACTIVITY.listener = Listener(recording, self._busy)

    def _finish(self) -> None:
        """Collective. End the recording, and write the trace and the costs."""
        recording = self._recording
        assert recording is not None  # it began
        self._stop_listening()
        with ACTIVITY.during("writing the profile after step", self._window.last):
            self._stop()
            recording.after = measure_offset(self._workers, clock_id())
            self._gathering.gather(recording)
        self._recording = None

    def _abandon(self) -> None:
        """End the recording without the other workers, and write what there is. Local: no collective."""
        if self._recording is None:
            return
        self._stop_listening()
        with ACTIVITY.during("writing the profile"):
            self._stop()
            recording, self._recording = self._recording, None
            if recording.begin_ns:
                self._gathering.gather_alone(recording)

    def _stop_listening(self) -> None:
        """End what the training thread's activities add to the recording. Local: no collective."""
        if not self._is_recording or self._recording is None:
            return
        ACTIVITY.listener = None
        if self._listener is not None:
            self._try("the last step's times are not known", self._listener.close)
            self._listener = None
        self._recording.end_ns = time.time_ns()
        if self._recording.phases:
            self._recording.begin_ns = self._recording.phases[0].begin_ns

    def _stop(self) -> None:
        """Stop what records, and read it, which may take long. Local: no collective."""
        if not self._is_recording:
            return
        self._is_recording, self._is_over = False, True
        recording, recorder = self._recording, self._recorder
        assert recording is not None  # it began
        assert recorder is not None
        most = min(_MOST_OF_ONE, max(1, _MOST_OPERATIONS // self._workers.size))
        recording.timeline = self._try("Horovod's timeline cannot be read", recorder.timeline.stop) or []

        def read() -> bool:
            recording.operations = recorder.stop()
            recording.cut_operations(most)
            return True

        if not self._try("what the framework's profiler recorded cannot be read", read):
            recording.operations = Operations()
        self._recorder = None

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
            self._recording.problems.append(
                f"rank {self._recording.rank}: {problem}: {text[0] if text else type(error).__name__}"
            )
            return None
