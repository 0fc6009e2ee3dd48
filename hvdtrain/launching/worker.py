"""A worker of ``hvdtrain.launch``: gets the function, calls it, and sends back what came of it."""

import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import cloudpickle

from hvdtrain.errors import EXIT_ENVIRONMENT, EnvironmentFault, HvdtrainError, Interrupted, WorkerFailure
from hvdtrain.host.launcher import host_name, launched_rank
from hvdtrain.host.start_reports import exit_at_once, report_begin
from hvdtrain.launching.channel import WorkerEnd
from hvdtrain.workers.user_errors import traceback_of

_EXIT_FAILED = 1


def main() -> None:
    """Do the work; if it fails, end this process with an exit code, so that the launcher ends the others."""
    rank = launched_rank() or 0
    try:
        end = WorkerEnd(rank)
    except HvdtrainError as error:
        print(f"hvdtrain: rank {rank} on {host_name()}: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_ENVIRONMENT)
    report_begin(rank)
    try:
        _become(end.function)
        call, args, kwargs = cloudpickle.loads(end.function["call"])
        result = call(*args, **kwargs)
        if rank == 0:
            _send(end, result)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:  # the function called sys.exit(0)
            if rank == 0:
                end.send_result(None)
            return
        _fail(end, rank, error)


def _send(end: WorkerEnd, result: Any) -> None:
    """Send the function's result.

    Raises:
        TypeError: If it cannot be pickled.
    """
    try:
        end.send_result(result)
    except (EnvironmentFault, RuntimeError):  # of the channel
        raise
    except Exception as error:
        raise TypeError(
            f"the result, a {type(result).__name__}, cannot be sent to the process that launched: {error}"
        ) from error


def _become(function: Mapping[str, Any]) -> None:
    """Let this process look like the one that launched: its modules can be imported, its command is known."""
    own = [path for path in sys.path if path not in function["path"]]
    sys.path[:] = [*function["path"], *own]
    sys.argv, sys.orig_argv = list(function["argv"]), list(function["orig_argv"])
    main_module = sys.modules["__main__"]
    if function["main_file"] is not None:
        main_module.__file__ = function["main_file"]
    elif hasattr(main_module, "__file__"):  # a notebook's classes have no file
        del main_module.__file__
    # a backend that only draws into a notebook
    if os.environ.get("MPLBACKEND", "").startswith("module://"):
        del os.environ["MPLBACKEND"]


def _signal_of(error: BaseException) -> int | None:
    """Return the signal that ended this worker, if one did."""
    if isinstance(error, Interrupted):
        return error.signal_number
    return int(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else None


def _fail(end: WorkerEnd, rank: int, error: BaseException) -> None:
    """Send the error and end this process."""
    is_known = isinstance(error, HvdtrainError)
    text = "".join(traceback.format_exception(error))
    try:
        end.send_error(
            {
                "rank": rank,
                "host": host_name(),
                "kind": type(error).__name__,
                "is_known": is_known,
                "problem": error.problem if isinstance(error, HvdtrainError) else str(error),
                "remedy": error.remedy if isinstance(error, HvdtrainError) else "",
                "traceback": text,
                "user_traceback": traceback_of(error.__cause__) if isinstance(error, WorkerFailure) else "",
                "signal": _signal_of(error),
            }
        )
    except Exception as lost:
        print(f"{text}\nhvdtrain: rank {rank}: the error could not be sent: {lost}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    exit_at_once(getattr(error, "exit_code", _EXIT_FAILED) or _EXIT_FAILED)


if __name__ == "__main__":
    main()
