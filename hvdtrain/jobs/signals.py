"""What signals do to a job: stop it at a step, save, or end it at once."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import ENDINGS, Interrupted, Removed, WorkerFailure
from hvdtrain.host.launcher import is_elastic
from hvdtrain.host.processes import HANDLED
from hvdtrain.workers.user_errors import where_raised

_LEAVES = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)


class Signals:
    """What signals requested of this worker."""

    def __init__(self) -> None:
        self.number: int | None = None  # the signal that requested a stop, if one came
        self._save = False
        self._waits_for_step = False
        self._end_seconds = math.inf

    def stop_after(self, seconds: float | None) -> None:
        """Request a stop when so much time has passed, if any is given."""
        if seconds is not None:
            self._end_seconds = time.monotonic() + seconds

    @property
    def why(self) -> str:
        """Why training is to stop, as text; empty if it is not."""
        if self.number is not None:
            return f"{signal.Signals(self.number).name} came"
        return "max_time is over" if self._is_over() else ""

    def _is_over(self) -> bool:
        return time.monotonic() >= self._end_seconds

    def poll(self) -> ControlFlags:
        """Return what this worker wants all of them to do; a save is wanted once for each signal."""
        save, self._save = self._save, False
        return ControlFlags(stop=self.number is not None or self._is_over(), save=save)

    @contextmanager
    def defer_to_step_boundary(self) -> Iterator[None]:
        """Return a context in which a request to stop waits until a step is done and its state is saved."""
        # It reaches to the end of the job: training that is done already is not stopped.
        self._waits_for_step = True
        try:
            yield
        finally:
            self._waits_for_step = False

    @contextmanager
    def signals_take_precedence(self) -> Iterator[None]:
        """Return a context in which what goes wrong after a signal counts as the signal."""
        # Native code that is interrupted may raise an error of its own in place of Interrupted; and a
        # worker that stops at a step may be left alone by others that were killed.
        try:
            yield
        except Exception as error:
            if self.number is None:
                raise
            raise Interrupted(self.number) from error

    def ignore(self) -> None:
        """Let no signal change how the job ends, if they are handled here."""
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                signal.signal(number, signal.SIG_IGN)

    def handle(self, number: int, _: FrameType | None) -> None:
        """Handle a signal, in the main thread."""
        if number == signal.SIGUSR1:
            self._save = True
            return
        # Once requested to stop in order, this worker does; launchers and schedulers like to ask again.
        waits = number != signal.SIGINT and (self._waits_for_step or self.number is not None)
        if waits:
            self.number = self.number or number
            return
        self.ignore()
        self.number = number
        raise Interrupted(number)


class ElasticSignals(Signals):
    """Those of a worker of an elastic job: SIGTERM, SIGUSR2 and SIGHUP mean that it leaves, at a step."""

    def __init__(self) -> None:
        super().__init__()
        # this worker's part in the job; None until it has joined it: until then SIGTERM ends it
        self.membership: Membership | None = None

    @property
    def why(self) -> str:
        """Why all workers are to stop; empty if they are not."""
        return super().why if self.membership is None else self.membership.why_stop()

    def poll(self) -> ControlFlags:
        """Return what this worker, or the driver, wants all of them to do."""
        flags, membership = super().poll(), self.membership
        if membership is None:
            return flags
        return ControlFlags(bool(membership.stop_wanted()), flags.save, change=membership.change_wanted())

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, in the main thread."""
        if self.membership is None or number not in _LEAVES:
            super().handle(number, frame)
        elif not self.membership.stop_wanted():  # once all are to stop, it stops with them
            why = f"{signal.Signals(number).name} came"
            self.membership.leave(why)
            if not self._waits_for_step:
                self.ignore()
                raise Removed(why)


@contextmanager
def interruptible() -> Iterator[Signals]:
    """Return a context in which signals stop training, in order or at once.

    SIGTERM, SIGUSR2 and SIGHUP stop it at a step while it trains, and raise Interrupted before and after;
    SIGINT always raises it. SIGUSR1 requests a save. SIGHUP stays ignored if it was, as nohup has it.
    SIGUSR2 is there for mpirun, which passes it on, but kills its workers soon after a SIGTERM. In an elastic
    job they are ``ElasticSignals``.

    A SystemExit of the task's code becomes an error: its exit code would be 0 as after complete training.
    So does any other of its exceptions that is no Exception.
    """
    seen = ElasticSignals() if is_elastic() else Signals()
    previous = {}
    if threading.current_thread() is threading.main_thread():
        has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [number for number in HANDLED if number != signal.SIGHUP or not has_nohup]
        previous = {number: signal.signal(number, seen.handle) for number in handled}
    try:
        yield seen
    except (Exception, *ENDINGS):
        raise
    except BaseException as error:
        what = "called sys.exit()" if isinstance(error, SystemExit) else "raised an exception"
        raise WorkerFailure(f"the task's code {what}: {where_raised(error)}") from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
