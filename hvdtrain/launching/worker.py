"""A worker of ``hvdtrain.launch``: reads the function, calls it, and writes its result or its error.

The files are in a folder that the process which launched made: no other user can read or write it.
"""

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from hvdtrain import errors
from hvdtrain.errors import EXIT_ENVIRONMENT, HvdtrainError, Interrupted, WorkerFailure
from hvdtrain.host.launcher import host_name, launched_rank
from hvdtrain.host.start_reports import exit_at_once, report_begin
from hvdtrain.workers.user_errors import traceback_of

FOLDER_VARIABLE = "HVDTRAIN_LAUNCH_FOLDER"
FUNCTION, RESULT, ERROR = "function.pickle", "result.pickle", "error-{}.pickle"  # of a rank


def main() -> None:
    """Do the work; if it fails, end this process with an exit code, so that the launcher ends the others."""
    rank, folder = launched_rank() or 0, Path(os.environ.pop(FOLDER_VARIABLE))
    try:
        function = pickle.loads((folder / FUNCTION).read_bytes())
    except OSError as error:
        print(
            f"hvdtrain: rank {rank} on {host_name()}: cannot read {folder}, in which the function is: "
            f"{error.strerror or error}\n  The working directory must be one that all hosts share.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_ENVIRONMENT)
    report_begin(rank)
    try:
        _become(function)
        call, args, kwargs = cloudpickle.loads(function["call"])
        try:
            result = call(*args, **kwargs)
        except SystemExit as error:
            if error.code:
                raise
            result = None
        if rank == 0:
            (folder / RESULT).write_bytes(_pickled(result))
    except BaseException as error:
        _fail(folder, rank, error)


def _pickled(result: Any) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise WorkerFailure(
            f"the result, a {type(result).__name__}, cannot be sent to the process that launched: {error}",
            "Return numbers, arrays or the path of a file.",
        ) from error
    return data


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


def _fail(folder: Path, rank: int, error: BaseException) -> None:
    """Write the error and end this process."""
    text = "".join(traceback.format_exception(error))
    kind, problem, remedy = WorkerFailure.__name__, f"{type(error).__name__}: {error}", text
    if isinstance(error, HvdtrainError) and getattr(errors, type(error).__name__, None) is type(error):
        cause = traceback_of(error.__cause__) if isinstance(error, WorkerFailure) else ""
        kind, problem = type(error).__name__, error.problem
        remedy = "\n".join(filter(None, [error.remedy, cause]))
    elif isinstance(error, errors.Stopped):
        kind, problem = errors.Stopped.__name__, str(error)
    number = error.signal_number if isinstance(error, Interrupted) else None
    found = {
        "rank": rank,
        "host": host_name(),
        "kind": kind,
        "problem": problem,
        "remedy": remedy,
        "signal": int(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else number,
    }
    try:
        written = folder / f"{rank}.part"
        written.write_bytes(pickle.dumps(found))
        written.rename(folder / ERROR.format(rank))  # whole, if the launcher ends this process
    except OSError as lost:
        print(f"{text}\nhvdtrain: rank {rank}: the error could not be written: {lost}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    exit_at_once(getattr(error, "exit_code", 1) or 1)


if __name__ == "__main__":
    main()
