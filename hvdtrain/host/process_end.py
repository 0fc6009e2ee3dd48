"""The end of a process whose job is done, whatever threads the task or a library left behind."""

import atexit
import os
import sys
import threading
import time
from contextlib import suppress

from hvdtrain.host.launches import output_rank
from hvdtrain.host.start_reports import exit_at_once

_THREADS_SECONDS = 10.0
_HANDLERS_SECONDS = 10.0


def limit_wait_for_threads(seconds: float = _THREADS_SECONDS) -> None:
    """Let this process end with exit code 0 some seconds after its main thread at the latest.

    Python waits without a limit for threads that are not daemons, and those keep a completed job, and with
    it the hosts, busy. When the time is up, the threads are named, exit handlers run, and the process ends.

    Args:
        seconds: how long to wait for the threads.
    """
    giving_up = threading.Event()
    reached = threading.RLock()  # reentrant: the thread that gives up runs the exit handlers itself

    def on_exit() -> None:  # the handler registered last runs first, after Python has waited for threads
        with reached:
            timer.cancel()

    def give_up() -> None:
        with reached:
            left = _others()
            if left:
                _note(left, seconds)
                _flush()
                giving_up.set()
                with suppress(Exception):
                    atexit._run_exitfuncs()
                _flush()
                os._exit(0)

    def end_despite_handlers() -> None:  # such as one that joins a thread
        giving_up.wait()
        time.sleep(_HANDLERS_SECONDS)
        exit_at_once(0)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    atexit.register(on_exit)
    timer.start()
    # since Python 3.12, no thread can be started any more when exit handlers run
    threading.Thread(target=end_despite_handlers, daemon=True).start()


def _others() -> list[str]:
    """Return the names of the threads that Python waits for."""
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    return [thread.name for thread in threads if thread is not threading.main_thread()]


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


def _flush() -> None:
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            file.flush()
