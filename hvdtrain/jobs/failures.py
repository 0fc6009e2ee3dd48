"""How a worker ends: by signals, on errors, and when the others do not answer."""

import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

import click

from hvdtrain.backends.memory import MemoryPlan, mebibytes
from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.elastic.member.membership import Membership, tell_driver
from hvdtrain.elastic.watch.liveness import Abandoned, Told, WatchEvent
from hvdtrain.errors import (
    ENDINGS,
    EXIT_ENVIRONMENT,
    HvdtrainError,
    Interrupted,
    JobEnded,
    LackOfMemoryError,
    PeerLostError,
    Removed,
    Stopped,
    WorkerFailure,
)
from hvdtrain.host.cores import is_out_of_memory, peak_bytes
from hvdtrain.host.launcher import WORKER_VARIABLE, host_name, is_elastic, launched_rank, output_rank
from hvdtrain.host.processes import HANDLED, deadline
from hvdtrain.host.start_reports import exit_at_once
from hvdtrain.reporting.jsonl import write_whole
from hvdtrain.storage.files import read_regular
from hvdtrain.storage.text import printable
from hvdtrain.workers.agreement import Workers
from hvdtrain.workers.user_errors import traceback_of, where_raised

CAUSE = ".failed"  # in the run directory
_WAIT_SECONDS = 0.5  # for a file system that shows another host's files late
_MAX_BYTES = 10_000


def exchange_cause(
    run_dir: Path, rank: int, host: str, problem: str | None, error: BaseException | None
) -> str | None:
    """Return what a worker's summary names as the problem: another worker's, if that one failed first."""
    # A worker that fails leaves its problem in the run directory before it ends, if it can reach it.
    left = run_dir / CAUSE
    is_own = isinstance(error, HvdtrainError) and not (isinstance(error, PeerLostError) or error.everywhere)
    if rank and is_own and problem and run_dir.is_dir():
        with suppress(OSError, ValueError):
            own = left.with_name(f"{CAUSE}-{rank}")  # of those that fail at once, one is kept, whole
            write_whole(own, f"rank {rank} on {host}: {problem}"[: _MAX_BYTES // 4])
            own.replace(left)
    until_seconds = time.monotonic() + _WAIT_SECONDS
    while rank == 0 and isinstance(error, PeerLostError) and time.monotonic() < until_seconds:
        with suppress(OSError, ValueError):
            if text := read_regular(left, _MAX_BYTES).decode():
                left.unlink()
                return text
        time.sleep(0.05)
    return problem


def lack_of_memory(error: BaseException, doing: str, plan: MemoryPlan | None) -> LackOfMemoryError | None:
    """Return the error of work that ran out of memory; None if an error says something else."""
    if not is_out_of_memory(error):
        return None
    lines = [f"This worker has had {mebibytes(peak_bytes())} of the host's memory."]
    if plan is not None:
        lines += [plan.describe_largest(), "To take less:", *(f"  {text}" for text in plan.remedies)]
    return LackOfMemoryError(f"{doing}, out of memory: {where_raised(error)}", "\n  ".join(lines))


# A rank other than 0 waits so long before it speaks: where rank 0 fails of the same, the launcher
# ends this one before it repeats it.
_SPEAK_AFTER_SECONDS = 1.0
_ENDED_BY_LAUNCHER_SECONDS = 5.0  # a worker whose peer went away waits so long for the launcher to end it
_CLOSE_SECONDS = 3.0
_SHARED_SECONDS = 3.0  # a worker whose error a script may catch waits so long for the others to fail, too
_WRITE_DOWN_SECONDS = 13.0  # before the process ends: the checkpoint has 10 s of it, rank 0's summary 3

_open: list[Callable[[], None]] = []  # closes Horovod, which an error that all workers had left open


@contextmanager
def expect_answer(seconds: float, rank: int, host: str) -> Iterator[None]:
    """Return a context that ends the process if the other workers do not answer in time."""
    # A collective cannot be given up, so this cannot be an exception.

    def give_up() -> None:
        remedy = "Check that all workers run the same command, and that all hosts can reach each other."
        _write(f"rank {rank} on {host}: the other workers did not answer within {seconds:.0f} s", remedy)
        exit_at_once(EXIT_ENVIRONMENT)

    with deadline(seconds, give_up):
        yield


def do_in_time(work: Callable[[], None], seconds: float = _CLOSE_SECONDS) -> None:
    """Do in another thread what may wait without limit, for a worker, a disk or a lock; give up in time."""
    thread = threading.Thread(target=work, daemon=True, name="do in time")
    thread.start()
    thread.join(seconds)


def end_at_once(event: WatchEvent, stacks: str, on_worker_lost: Callable[[str], None]) -> None:
    """Report what the watch noticed and end this process, from a thread: the main one may wait for ever."""

    def speak() -> None:
        _show(stacks)
        _say(PeerLostError(event.problem, event.remedy), output_rank(), debug=False)
        _flush()

    if not isinstance(event, Told | Abandoned):
        try:  # first, since mpirun may kill this process in 0.3 s; nobody may read it
            do_in_time(speak)
        except RuntimeError:  # no thread can be started
            speak()
        _write_down(on_worker_lost, event.problem)
    exit_at_once(EXIT_ENVIRONMENT)


def end_of_job(error: JobEnded, on_worker_lost: Callable[[str], None] | None) -> None:
    """End this process, whose elastic job has ended, from a thread: the training thread did not notice."""
    if on_worker_lost is not None:
        _write_down(on_worker_lost, error.problem)
    if error.speaks:
        _say(error, output_rank(), debug=False)
    _flush()
    os._exit(error.exit_code)


def _write_down(on_worker_lost: Callable[[str], None], problem: str) -> None:
    def write_down() -> None:
        with suppress(Exception):
            on_worker_lost(problem)

    with suppress(RuntimeError):  # no thread can be started
        do_in_time(write_down, _WRITE_DOWN_SECONDS)


def is_shared(error: BaseException, workers: Workers) -> bool:
    """Collective, if the other workers fail too. Return whether all workers end with an error now."""
    # Then no worker waits for another, and Horovod can stay for what the script does next. A worker whose
    # error is its own waits in vain, for ``_SHARED_SECONDS``.
    if not isinstance(error, HvdtrainError) or isinstance(error, PeerLostError | JobEnded):
        return False
    answers: list[bool] = []

    def ask() -> None:
        with suppress(Exception):
            answers.append(workers.have_failed())

    do_in_time(ask, _SHARED_SECONDS)
    return bool(answers and answers[0])


def leave_open(close: Callable[[], None]) -> None:
    """Keep what closes Horovod, a function of no job, until this process ends with an error, if it does."""
    _open[:] = [close]


def name_lost_worker(error: PeerLostError, explain: Callable[[], WatchEvent | None]) -> PeerLostError:
    """Return the error of a collective that failed, naming the worker that it failed for if that is known."""
    if error.names_worker or (event := explain()) is None:
        return error
    return PeerLostError(event.problem, event.remedy or error.remedy, names_worker=True)


def is_debugging() -> bool:
    """Return whether --debug was given, so that tracebacks and the stacks of stalled workers are shown."""
    return "--debug" in sys.argv


def end_if_uncaught() -> None:
    """Let an error of hvdtrain that a script does not catch end it as the command line would."""

    def end_or_show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, HvdtrainError | Interrupted | Stopped | Removed):
            end_worker(error, debug=False)
        sys.__excepthook__(kind, error, where)

    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = end_or_show


def end_worker(error: BaseException, debug: bool) -> None:
    """Report an error, once among all workers, and end this process with its exit code."""
    stopped = isinstance(error, Stopped)  # then its exit code stands, whatever the launcher still sends
    for number in HANDLED:
        may_end_it = number in (signal.SIGINT, signal.SIGTERM) and not stopped
        signal.signal(number, signal.SIG_DFL if may_end_it else signal.SIG_IGN)
    while _open:
        do_in_time(_open.pop())
    rank = output_rank()
    if is_elastic():
        error = tell_driver(error)  # it also says who reports it
        rank = None
    elif isinstance(error, PeerLostError):
        time.sleep(_ENDED_BY_LAUNCHER_SECONDS)
    elif rank and not stopped:
        time.sleep(_SPEAK_AFTER_SECONDS)
    if not (rank and getattr(error, "everywhere", False)) and getattr(error, "speaks", True):
        _say(error, rank, debug)
    _flush()
    exit_at_once(getattr(error, "exit_code", 1))


def _say(error: BaseException, rank: int | None, debug: bool) -> None:
    if isinstance(error, Interrupted | Stopped | Removed):
        return  # rank 0 has reported where it stood
    who = f"worker {os.environ.get(WORKER_VARIABLE, '')}".strip() if is_elastic() else ""
    if is_elastic() and rank is None:  # before the first world there are no ranks, and later other ones
        rank = launched_rank()
    who = who if rank is None else f"rank {rank}"
    who = f"{who} on {host_name()}: " if who else ""
    if isinstance(error, WorkerFailure):
        _show(traceback_of(error.__cause__))
    elif debug or not isinstance(error, HvdtrainError):
        _show("".join(traceback.format_exception(error)))
    if isinstance(error, HvdtrainError):
        _write(f"{who}{error.problem}", error.remedy)
    else:
        _write(f"{who}{type(error).__name__}: {error}", "This is a bug in hvdtrain: please report it.")


def _write(problem: str, remedy: str) -> None:
    _show(f"hvdtrain: {problem}\n" + (f"  {remedy}\n" if remedy else ""))


def _show(text: str) -> None:
    """Write to standard error, without what could control the terminal."""
    with suppress(OSError):
        click.echo(printable(text), err=True, nl=False)


def _flush() -> None:
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk, or a reader that is gone
            file.flush()


_LEAVES = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)


class Signals:
    """What signals requested of this worker. One of an elastic job leaves it on those of ``_LEAVES``."""

    def __init__(self) -> None:
        # this worker's part in an elastic job; None until it has joined it: until then SIGTERM ends it
        self.membership: Membership | None = None
        self.number: int | None = None  # the signal that requested a stop, if one came
        self._save = False
        self._waits_for_step = False
        self.end_seconds = math.inf  # when training is to stop, by time.monotonic

    @property
    def why(self) -> str:
        """Why all workers are to stop, as text; empty if they are not."""
        if self.membership is not None:
            return self.membership.orders.why_stop
        if self.number is not None:
            return f"{signal.Signals(self.number).name} came"
        return "max_time is over" if time.monotonic() >= self.end_seconds else ""

    def poll(self) -> ControlFlags:
        """Return what this worker, or its driver, wants all of them to do; a save once for each signal."""
        save, self._save = self._save, False
        if (job := self.membership) is not None:
            return ControlFlags(bool(job.orders.stop), save, change=job.orders.wants_change)
        return ControlFlags(stop=bool(self.why), save=save)

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
        if (job := self.membership) is not None and number in _LEAVES:
            if job.orders.stop:  # this worker stops with all of them
                return
            job.leave(why := f"{signal.Signals(number).name} came")
            if self._waits_for_step:
                return
            self.ignore()
            raise Removed(why)
        # Once requested to stop in order, this worker does; launchers and schedulers like to ask again.
        if number != signal.SIGINT and (self._waits_for_step or self.number is not None):
            self.number = self.number or number
            return
        self.ignore()
        self.number = number
        raise Interrupted(number)


@contextmanager
def interruptible() -> Iterator[Signals]:
    """Return a context in which signals stop training, in order or at once."""
    # SIGUSR2 is there for mpirun, which kills its workers soon after a SIGTERM; nohup ignores SIGHUP.
    # What is no Exception of the task's code becomes an error: sys.exit() would end the job as complete.
    seen, previous = Signals(), {}
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
