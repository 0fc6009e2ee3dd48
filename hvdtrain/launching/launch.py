"""``hvdtrain.launch``: workers for one function, started from a notebook or a script."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

import cloudpickle

import hvdtrain
from hvdtrain import errors
from hvdtrain.errors import EnvironmentFault, HvdtrainError, PeerLostError, UsageError
from hvdtrain.horovod_build.installed import horovodrun_path
from hvdtrain.host.environment import for_children
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.host.launcher import host_name, stated_launch
from hvdtrain.host.processes import start_group
from hvdtrain.launching.worker import ERROR, FOLDER_VARIABLE, FUNCTION, RESULT
from hvdtrain.storage.files import exchange_folder

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
    grace = os.environ.get(_GRACE_VARIABLE) or str(_GRACE_SECONDS)
    try:
        end_seconds = float(grace) + _END_SECONDS
    except ValueError:
        raise UsageError(f"{_GRACE_VARIABLE} must be a number of seconds, found {grace!r}") from None
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
    with stream:
        for line in stream:
            with suppress(OSError, ValueError):
                encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
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

    The workers are new processes, which ``horovodrun`` starts: the function calls ``hvdtrain.train``,
    ``evaluate`` or ``predict``, each of which then runs on all of them. It can be defined in a cell of a
    notebook or in a script, and may use what is defined there: it is sent to the workers by value, by
    cloudpickle; functions of modules are imported there. What the workers print is shown here, each line
    with the rank. Nothing is left of them when this returns, when Ctrl-C is pressed, or when this process
    ends.

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
        UsageError: If an argument is wrong, this process is a worker itself, or the function cannot be sent.
        HvdtrainError: What a worker raised, with its rank, and the class that it had there.
        WorkerFailure: If a worker raised another exception: with the rank, its text and its traceback.
        EnvironmentFault: If a worker ended without one, killed for instance.
        KeyboardInterrupt: If Ctrl-C was pressed; the workers have ended.
    """
    _check(fn, np, controller)
    names = {host.name for host in parse_host_list(hosts)} if hosts is not None else set()
    command = [horovodrun_path(), *([f"--{controller}"] if controller else []), "-np", str(np)]
    command += ["-H", hosts or f"localhost:{np}", sys.executable, "-m", "hvdtrain.launching.worker"]
    is_local = names <= {"localhost", "127.0.0.1", host_name()}
    with exchange_folder(shared=not is_local) as folder:
        (folder / FUNCTION).write_bytes(_function(fn, args, kwargs))
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
    if isinstance(np, bool) or not isinstance(np, int) or np < 1:
        raise UsageError(f"np must be a whole number of at least 1, found {np!r}")
    if controller not in (None, "mpi", "gloo"):
        raise UsageError(f"controller must be 'mpi', 'gloo' or None, found {controller!r}")
    if (launch := stated_launch()) is not None and launch.size > 1:
        raise UsageError(
            f"launch() starts workers; this process is one of {launch.size} that {launch.launcher} started",
            "Call the function itself, or start the script without a launcher.",
            everywhere=True,
        )


def _function(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bytes:
    """Return what the workers need to call the function."""
    try:
        call = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise UsageError(
            f"the function or its arguments cannot be sent to the workers: {type(error).__name__}: {error}",
            "Open files, connections, locks and models on a GPU inside of the function.",
        ) from error
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    return pickle.dumps(
        {
            "call": call,
            "path": [os.path.abspath(path) for path in sys.path],
            "argv": list(sys.argv),
            "orig_argv": list(getattr(sys, "orig_argv", sys.argv)),
            "main_file": None if main_file is None else os.path.abspath(main_file),
        }
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
    ended = [one for one in found if one["signal"] not in (None, signal.SIGINT)]
    lost = [one for one in found if one["kind"] == PeerLostError.__name__]
    first = [*(one for one in found if one not in ended and one not in lost), *lost, *ended][0]
    where, kind, number = f"rank {first['rank']} on {first['host']}", first["kind"], first["signal"]
    if kind == errors.Stopped.__name__:
        return errors.Stopped(f"{where}: {first['problem']}")
    if number == signal.SIGINT:
        return KeyboardInterrupt(f"{where} was interrupted")
    if number is not None:
        name = signal.Signals(number).name
        return EnvironmentFault(f"the workers ended {how}; {where} was ended by {name}", _SEE_OUTPUT)
    error: HvdtrainError = getattr(errors, kind)(f"{where}: {first['problem']}", first["remedy"])
    return error
