"""``hvdtrain.launch``: workers for one function, started from a notebook or a script."""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cloudpickle

import hvdtrain
from hvdtrain import errors
from hvdtrain.errors import EnvironmentFault, HvdtrainError, PeerLostError, UsageError, WorkerFailure
from hvdtrain.horovod_build.installed import BUILD_COMMAND
from hvdtrain.host.environment import for_children
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.host.launcher import host_name, stated_launch
from hvdtrain.host.processes import start_group
from hvdtrain.launching.channel import Channel, opened

_POLL_SECONDS = 0.2
_LATE_OUTPUT_SECONDS = 1.0  # of processes that outlive the launcher
_INTERRUPT_SECONDS = 15.0  # from Ctrl-C until the launcher is ended
_GRACE_VARIABLE, _GRACE_SECONDS = "HOROVOD_GRACEFUL_TERMINATION_SECONDS", 30.0  # horovodrun's, for workers
_END_SECONDS = 10.0  # that horovodrun has beyond it
_BYTES = 1 << 16


def run_command(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a launcher to its end, and show the output of its workers where this process writes.

    Args:
        command: the launcher with its arguments.
        environ: its environment.

    Returns:
        Its exit code; 128 + n if signal n ended it.

    Raises:
        KeyboardInterrupt: If Ctrl-C came; the workers have ended.
    """
    starter = [sys.executable, "-m", "hvdtrain.launching.starter", str(os.getpid())]
    # Ctrl-C goes through this process
    process = start_group([*starter, *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with _ended(process):
        try:
            _show_output(process)
        except KeyboardInterrupt:
            _interrupt(process)
            raise
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Return a context at whose end the launcher has ended: asked to, or killed."""
    try:
        yield
    finally:
        assert process.stdout is not None
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(number)
                    _show_output(process, _end_seconds())  # a worker that writes into a full pipe would wait
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_LATE_OUTPUT_SECONDS)
        except BaseException:  # asked again
            process.kill()
            raise
        finally:
            process.stdout.close()


def _end_seconds() -> float:
    """Return how long a launcher that was asked to end may take."""
    with suppress(ValueError):  # which it refuses itself
        return float(os.environ.get(_GRACE_VARIABLE) or _GRACE_SECONDS) + _END_SECONDS
    return _GRACE_SECONDS + _END_SECONDS


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Pass Ctrl-C on, and show what the workers still say; another Ctrl-C ends the wait."""
    with suppress(KeyboardInterrupt):
        process.send_signal(signal.SIGINT)
        _show_output(process, _INTERRUPT_SECONDS)
        return
    process.kill()


def _show_output(process: subprocess.Popen[bytes], limit_seconds: float | None = None) -> None:
    """Show what a process writes until it ends, or until the time is over."""
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    until = None if limit_seconds is None else time.monotonic() + limit_seconds
    ended: float | None = None
    while until is None or time.monotonic() < until:
        if select.select([descriptor], [], [], _POLL_SECONDS)[0]:
            data = os.read(descriptor, _BYTES)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            _show(b"".join(line + b"\n" for line in lines))
        elif process.poll() is not None:
            ended = ended or time.monotonic()
            if time.monotonic() - ended > _LATE_OUTPUT_SECONDS:
                break
    _show(rest)


def _show(text: bytes) -> None:
    if text:
        with suppress(OSError, ValueError):
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            sys.stdout.write(text.decode(errors="replace").encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()


_LOCAL = ("localhost", "127.0.0.1")
_SEE_OUTPUT = "Their output, above, says more."
_STOPPED = "Stopped"


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
            given. The function and its arguments travel there unencrypted.
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
    command = _horovodrun(np, hosts, controller)
    with opened(_function(fn, args, kwargs), is_local=_is_local(hosts)) as channel:
        code = run_command([*command, *_worker()], _environment(channel))
        if code == 0:
            has_result, result = channel.result()
            if has_result:
                return result
        raise _error(channel, code)


def _check(fn: Any, np: Any, controller: Any) -> None:
    """Check what was given.

    Raises:
        UsageError: If it is wrong, or this process is a worker.
    """
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


def _function(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what the workers need to call the function.

    Raises:
        UsageError: If it cannot be pickled.
    """
    try:
        call = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise UsageError(
            f"the function or its arguments cannot be sent to the workers: {type(error).__name__}: {error}",
            "Open files, connections, locks and models on a GPU inside of the function.",
        ) from error
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    return {
        "call": call,
        "path": [os.path.abspath(path) for path in sys.path],
        "argv": list(sys.argv),
        "orig_argv": list(getattr(sys, "orig_argv", sys.argv)),
        "main_file": None if main_file is None else os.path.abspath(main_file),
    }


def _horovodrun(np: int, hosts: str | None, controller: str | None) -> list[str]:
    """Return the command that launches workers.

    Raises:
        EnvironmentFault: If there is no horovodrun.
        UsageError: If the hosts cannot be read.
    """
    beside = Path(sys.executable).with_name("horovodrun")
    launcher = str(beside) if beside.is_file() else shutil.which("horovodrun")
    if launcher is None:
        raise EnvironmentFault("there is no horovodrun", f"Run: {BUILD_COMMAND}")
    if hosts is not None:
        parse_host_list(hosts)
    words = [f"--{controller}"] if controller else []
    return [launcher, *words, "-np", str(np), "-H", hosts or f"localhost:{np}"]


def _worker() -> list[str]:
    return [sys.executable, "-m", "hvdtrain.launching.worker"]


def _is_local(hosts: str | None) -> bool:
    """Return whether all workers are on this host."""
    return hosts is None or all(host.name in (*_LOCAL, host_name()) for host in parse_host_list(hosts))


def _environment(channel: Channel) -> dict[str, str]:
    """Return the environment of the workers: that of this process, in which hvdtrain can be imported."""
    environ = {**for_children(), **channel.environ}
    package = Path(hvdtrain.__file__).resolve().parent.parent
    if "site-packages" not in package.parts and "dist-packages" not in package.parts:
        before = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{package}{os.pathsep}{before}" if before else str(package)
    return environ


def _order(error: Mapping[str, Any]) -> int:
    """Return how late the error of a worker counts: a launcher ends the others of one that ended."""
    if error["signal"] not in (None, signal.SIGINT):
        return 2
    return int(error["kind"] == PeerLostError.__name__)


def _error(channel: Channel, code: int) -> BaseException:
    """Return what to raise: the first error of a worker that is not only what the end of another one did."""
    found = channel.errors()
    how = f"with exit code {code}" if code else "without a result"
    if not found:
        return EnvironmentFault(f"the workers ended {how}", _SEE_OUTPUT)
    first = min(found, key=_order)
    where = f"rank {first['rank']} on {first['host']}"
    if first["kind"] == _STOPPED:
        return errors.Stopped(f"{where}: {first['problem']}")
    if (number := first["signal"]) is not None:
        if number == signal.SIGINT:
            return KeyboardInterrupt(f"{where} was interrupted")
        name = signal.Signals(number).name
        return EnvironmentFault(f"the workers ended {how}; {where} was ended by {name}", _SEE_OUTPUT)
    kind = getattr(errors, first["kind"], None)
    if first["is_known"] and isinstance(kind, type) and issubclass(kind, HvdtrainError):
        remedy = "\n".join(filter(None, [first["remedy"], first["user_traceback"]]))
        return kind(f"{where}: {first['problem']}", remedy)
    return WorkerFailure(f"{where}: {first['kind']}: {first['problem']}", first["traceback"])
