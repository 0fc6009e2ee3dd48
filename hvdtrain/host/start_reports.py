"""What a worker reports to horovodrun: that it starts Horovod, and that it ends by itself."""

import atexit
import hmac
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from typing import NoReturn

import psutil

from hvdtrain.errors import UsageError
from hvdtrain.host.launcher import output_rank

REPORT_VARIABLE = "HOROVOD_START_REPORT"  # address:port:key
_LIMIT_VARIABLE = "HOROVOD_START_TIMEOUT"  # horovodrun's --start-timeout
_LIMIT_SECONDS = 60.0
_MOST_SECONDS = 86_400
_EVERY_SECONDS = 1.0  # a datagram may be lost
_ANSWER_SECONDS = 0.2
_TRIES = 25

_begun: list[tuple[int, "_Sender"]] = []  # of the process that reported it, until it has reported its end

# what the workers of one job have in common, with the variable of the rank
_JOBS = (("HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RANK"), ("PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK"))


def start_limit(environ: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds a worker waits for the others to start Horovod."""
    given = environ.get(_LIMIT_VARIABLE)
    if given is None:
        return _LIMIT_SECONDS
    with suppress(ValueError):
        if 0 < (seconds := float(given)) <= _MOST_SECONDS:
            return seconds
    raise UsageError(
        f"{_LIMIT_VARIABLE} must be a number of seconds between 0 and {_MOST_SECONDS}, found {given!r}",
        "It is horovodrun's --start-timeout: how long workers wait for one that does not start (60).",
        everywhere=True,
    )


@contextmanager
def reported_start(rank: int | None, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Context manager: tell horovodrun that this worker starts Horovod; at a good end, that all have."""
    sender = _sender(rank, environ)
    if sender is None:
        yield
        return

    def repeat() -> None:
        sender.send(b"%d" % sender.rank)
        while not ended.wait(_EVERY_SECONDS):
            sender.send(b"%d" % sender.rank)

    ended = threading.Event()
    thread = threading.Thread(target=repeat, daemon=True, name="start-reports")
    thread.start()
    try:
        yield
        sender.send(b"all")
    finally:
        ended.set()
        thread.join()


def report_begin(rank: int | None, environ: Mapping[str, str] = os.environ) -> None:
    """Tell horovodrun that this worker begins, and when Python ends in it, that it ends by itself."""
    sender = _sender(rank, environ)
    if sender is not None and not _begun:
        _begun.append((os.getpid(), sender))
        sender.send(b"begin %d" % sender.rank)
        if parent_process() is None:
            atexit.register(report_end)
        else:  # a process of multiprocessing, which runs no exit handlers if it was forked
            Finalize(None, report_end, exitpriority=-1)


def report_end(code: int | None = None) -> None:
    """Tell horovodrun that this process ends by itself."""
    while _begun:
        process, sender = _begun.pop()
        if process == os.getpid():  # and not of a process that was forked
            sender.send(b"end %d" % sender.rank + (b"" if code is None else b" %d" % code), _TRIES)


def exit_at_once(code: int) -> NoReturn:
    """End this process without clean-up; horovodrun hears that it ends by itself."""
    report_end(code)
    os._exit(code)


class _Sender:
    """Sends signed datagrams to horovodrun. They are a help, not a condition: no failure is an error."""

    def __init__(self, rank: int, address: tuple[str, int], key: bytes) -> None:
        self.rank = rank
        self._address = address
        self._key = key

    def send(self, message: bytes, tries: int = 1) -> None:
        """Send a message, in several tries until an answer says that it was received."""
        digest, answer = (
            hmac.digest(self._key, text, "sha256") for text in (message, b"received " + message)
        )
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
            connection.connect(self._address)
            connection.settimeout(_ANSWER_SECONDS)
            for number in range(tries):
                connection.send(digest + message)
                with suppress(TimeoutError):
                    if number + 1 < tries and connection.recv(64) == answer:
                        return


def _sender(rank: int | None, environ: Mapping[str, str]) -> _Sender | None:
    address, port, key = [*environ.get(REPORT_VARIABLE, "").split(":"), "", ""][:3]
    if rank is None or not port.isdecimal():
        return None
    return _Sender(rank, (address, int(port)), bytes.fromhex(key))


def stopped_workers(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the job's workers on this host that a signal or a debugger has stopped, as text."""
    found: dict[int, str] = {}
    for job, rank_variable in _JOBS:
        if job not in environ:
            continue
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError, ValueError):
                theirs = process.environ()
                is_stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
                if is_stopped and theirs.get(job) == environ[job] and rank_variable in theirs:
                    rank = int(theirs[rank_variable])
                    found.setdefault(rank, f"rank {rank} (process {process.pid})")
    return [found[rank] for rank in sorted(found)]


_THREADS_SECONDS = 10.0
_HANDLERS_SECONDS = 10.0


def limit_wait_for_threads(seconds: float = _THREADS_SECONDS) -> None:
    """Let this process end with exit code 0 some seconds after its main thread at the latest."""
    reached = threading.RLock()  # reentrant: the thread that gives up runs the exit handlers itself

    def on_exit() -> None:  # the handler registered last runs first, after Python has waited for threads
        with reached:
            timer.cancel()

    def give_up() -> None:
        with reached:
            threads = [one for one in threading.enumerate() if not one.daemon]
            left = [one.name for one in threads if one is not threading.main_thread()]
            if left:
                _note(left, seconds)
                # a handler may join a thread
                last = threading.Timer(_HANDLERS_SECONDS, exit_at_once, [0])
                last.daemon = True
                with suppress(RuntimeError):  # Python 3.12.0 and 3.12.1 start no thread any more here
                    last.start()
                with suppress(Exception):
                    atexit._run_exitfuncs()
                for file in (sys.stdout, sys.stderr):
                    with suppress(OSError, ValueError, AttributeError):
                        file.flush()
                os._exit(0)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    atexit.register(on_exit)
    timer.start()


def _note(names: list[str], seconds: float) -> None:
    rank = output_rank()
    who = "" if rank is None else f"rank {rank}: "
    which = "a thread that is" if len(names) == 1 else "threads that are"
    with suppress(OSError, ValueError):
        print(
            f"note: {who}the job is done; {seconds:g} s later this process ends despite {which} still "
            f"running: {', '.join(names)}. End them in on_end() of a callback, or make them daemons.",
            file=sys.stderr,
            flush=True,
        )
