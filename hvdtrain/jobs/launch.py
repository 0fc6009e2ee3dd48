"""``hvdtrain.launch``: workers for one function, started from a notebook or a script; each runs this module.

They exchange files in a folder that no other user can read or write.
"""

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

import cloudpickle

import hvdtrain
from hvdtrain import errors
from hvdtrain.errors import EnvironmentFault, HvdtrainError, PeerLostError, UsageError, WorkerFailure
from hvdtrain.horovod_build.installed import horovodrun_path
from hvdtrain.host.environment import for_children
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.host.launcher import host_name, launched_rank, stated_launch
from hvdtrain.host.processes import start_group
from hvdtrain.host.start_reports import exit_at_once, report_begin
from hvdtrain.storage.files import exchange_folder
from hvdtrain.workers.user_errors import traceback_of

FOLDER_VARIABLE = "HVDTRAIN_LAUNCH_FOLDER"
FUNCTION, RESULT, ERROR = "function.pickle", "result.pickle", "error-{}.pickle"  # of a rank
_LATE_OUTPUT_SECONDS = 1.0  # of processes that outlive the launcher
_INTERRUPT_SECONDS = 15.0  # from Ctrl-C until the launcher is ended
_GRACE_VARIABLE, _GRACE_SECONDS = "HOROVOD_GRACEFUL_TERMINATION_SECONDS", 30.0  # horovodrun's, for workers
_END_SECONDS = 10.0  # that horovodrun has beyond it
_SEE_OUTPUT = "Their output, above, says more."
# becomes a command that ends when the process ends that started it, for whatever reason
_STARTER = (
    "import os, sys; from hvdtrain.host.processes import end_with_parent; "
    "end_with_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)


def run_command(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a launcher to its end, and show the output of its workers where this process writes."""
    grace = os.environ.get(_GRACE_VARIABLE, "")
    end_seconds = (float(grace) if grace.isdecimal() else _GRACE_SECONDS) + _END_SECONDS
    words = [sys.executable, "-c", _STARTER, str(os.getpid()), *command]
    # Ctrl-C goes through this process
    process = start_group(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    reader = Thread(target=_show_output, args=(process.stdout,), name="hvdtrain launch output", daemon=True)
    reader.start()
    try:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_INTERRUPT_SECONDS)
            raise
        return code if code >= 0 else 128 - code
    finally:
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(end_seconds)
        finally:
            process.kill()  # also if another signal came meanwhile
            process.wait()
            reader.join(_LATE_OUTPUT_SECONDS)


def _show_output(stream: IO[bytes]) -> None:
    """Show whole lines as they come, until all processes that write them have ended."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with stream:
        for line in stream:
            with suppress(OSError, ValueError):
                sys.stdout.write(line.decode(errors="replace").encode(encoding, "replace").decode(encoding))
                sys.stdout.flush()


def launch(
    fn: Callable[..., Any],
    *,
    np: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    hosts: str | None = None,
    controller: str | None = None,
) -> Any:
    """Start workers, call a function on each of them, and return what it returned on rank 0.

    The workers are processes that ``horovodrun`` starts; the function calls ``hvdtrain.train`` and the like.
    It is sent by value if it is defined in a notebook or script, with what it uses of it. What the workers
    print is shown here. Nothing is left of them when this returns, is interrupted, or this process ends.

    Args:
        fn: the function.
        np: number of workers.
        args: arguments of the function.
        kwargs: keyword arguments of the function.
        hosts: hosts and slots, such as "host1:2,host2:2", as ``horovodrun -H`` takes them; this host if not
            given. On other hosts, the working directory must be one that all of them share.
        controller: "mpi" or "gloo"; the one that Horovod prefers if not given.

    Returns:
        What the function returned on rank 0; it must be something that can be pickled.

    Raises:
        HvdtrainError: What a worker raised, with its rank; ``WorkerFailure`` with its traceback if it is
            another exception, and ``EnvironmentFault`` if the worker was killed.
        UsageError: If an argument is wrong, this process is a worker itself, or the function cannot be sent.
    """
    _check(fn, np, controller)
    names = {host.name for host in parse_host_list(hosts)} if hosts is not None else set()
    command = [horovodrun_path(), *([f"--{controller}"] if controller else []), "-np", str(np)]
    command += ["-H", hosts or f"localhost:{np}", sys.executable, "-m", "hvdtrain.jobs.launch"]
    is_local = names <= {"localhost", "127.0.0.1", host_name()}
    problem = "the function or its arguments cannot be sent to the workers"
    advice = "Open files, connections, locks and models on a GPU inside of the function."
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    function = {
        "call": _dumped((fn, tuple(args), dict(kwargs or {})), UsageError, problem, advice),
        "path": [os.path.abspath(path) for path in sys.path],
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "main_file": main_file and os.path.abspath(main_file),
    }
    with exchange_folder(shared=not is_local) as folder:
        (folder / FUNCTION).write_bytes(pickle.dumps(function))
        code = run_command(command, _environment(folder))
        if not code and (folder / RESULT).exists():
            return pickle.loads((folder / RESULT).read_bytes())
        errors_written = sorted(folder.glob(ERROR.format("*")), key=lambda path: path.stat().st_mtime_ns)
        raise error_of([pickle.loads(path.read_bytes()) for path in errors_written], code)


def _check(fn: Any, np: Any, controller: Any) -> None:
    """Check what was given."""
    if not callable(fn):
        raise UsageError(
            f"launch() takes a function, found a {type(fn).__name__}", "Write launch(fn), not launch(fn())."
        )
    if isinstance(np, bool) or not isinstance(np, int) or np < 1 or controller not in (None, "mpi", "gloo"):
        raise UsageError(
            f"np must be a whole number of at least 1, found {np!r}, and controller 'mpi', 'gloo' or None, "
            f"found {controller!r}"
        )
    if (launch := stated_launch()) is not None and launch.size > 1:
        raise UsageError(
            f"launch() starts workers; this process is one of {launch.size} that {launch.launcher} started",
            "Call the function itself, or start the script without a launcher.",
            everywhere=True,
        )


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of the workers: that of this process, in which hvdtrain can be imported."""
    environ = {**for_children(), FOLDER_VARIABLE: str(folder)}
    package = Path(hvdtrain.__file__).resolve().parent.parent
    if "site-packages" not in package.parts and "dist-packages" not in package.parts:
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), environ.get("PYTHONPATH")]))
    return environ


def error_of(found: Sequence[Mapping[str, Any]], code: int) -> BaseException:
    """Return what to raise: the first error of a worker that is not only what the end of another one did."""
    how = f"with exit code {code}" if code else "without a result"
    if not found:
        return EnvironmentFault(f"the workers ended {how}", _SEE_OUTPUT)

    # a launcher ends the other workers of one that ended
    def order(one: Mapping[str, Any]) -> int:
        return 2 if one["signal"] not in (None, signal.SIGINT) else one["kind"] == PeerLostError.__name__

    first = min(found, key=order)
    where, number = f"rank {first['rank']} on {first['host']}", first["signal"]
    if number == signal.SIGINT:
        return KeyboardInterrupt(f"{where} was interrupted")
    if number is not None:
        why = f"{where} was ended by {signal.Signals(number).name}"
        return EnvironmentFault(f"the workers ended {how}; {why}", _SEE_OUTPUT)
    cls, problem = getattr(errors, first["kind"]), f"{where}: {first['problem']}"
    error: BaseException = cls(problem, first["remedy"]) if issubclass(cls, HvdtrainError) else cls(problem)
    return error


def main() -> None:
    """Do a worker's work; if it fails, end it with an exit code, so that the launcher ends the others."""
    rank, folder = launched_rank() or 0, Path(os.environ.pop(FOLDER_VARIABLE))
    try:
        function = pickle.loads((folder / FUNCTION).read_bytes())
    except OSError as error:
        text = f"hvdtrain: rank {rank} on {host_name()}: {error}: all hosts must share the working directory."
        print(text, file=sys.stderr, flush=True)
        os._exit(errors.EXIT_ENVIRONMENT)
    report_begin(rank)
    try:
        # this process looks like the one that launched: its modules can be imported, its command is known
        sys.path[:] = dict.fromkeys([*function["path"], *sys.path])
        sys.argv, sys.orig_argv = function["argv"], function["orig_argv"]
        main_module = sys.modules["__main__"]
        if function["main_file"] is not None:
            main_module.__file__ = function["main_file"]
        elif hasattr(main_module, "__file__"):  # a notebook's classes have no file
            del main_module.__file__
        if os.environ.get("MPLBACKEND", "").startswith("module://"):  # it only draws into a notebook
            del os.environ["MPLBACKEND"]
        call, args, kwargs = cloudpickle.loads(function["call"])
        try:
            result = call(*args, **kwargs)
        except SystemExit as error:
            if error.code:
                raise
            result = None
        if rank == 0:
            problem = f"the result, a {type(result).__name__}, cannot be sent to the process that launched"
            remedy = "Return numbers, arrays or the path of a file."
            (folder / RESULT).write_bytes(_dumped(result, WorkerFailure, problem, remedy))
    except BaseException as error:
        _fail(folder, rank, error)


def _dumped(value: Any, kind: type[HvdtrainError], problem: str, remedy: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise kind(f"{problem}: {type(error).__name__}: {error}", remedy) from error


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
    number = getattr(error, "signal_number", None)
    number = int(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else number
    found = {"rank": rank, "host": host_name(), "kind": kind, "problem": problem, "remedy": remedy}
    try:
        written = folder / f"{rank}.part"
        written.write_bytes(pickle.dumps({**found, "signal": number}))
        written.rename(folder / ERROR.format(rank))  # whole, if the launcher ends this process
    except OSError as lost:
        print(f"{text}\nhvdtrain: rank {rank}: the error could not be written: {lost}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    exit_at_once(getattr(error, "exit_code", 1) or 1)


if __name__ == "__main__":
    main()
