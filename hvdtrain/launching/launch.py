"""``hvdtrain.launch``: workers for one function, started from a notebook or a script."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

import hvdtrain
from hvdtrain import errors
from hvdtrain.errors import EnvironmentFault, HvdtrainError, PeerLostError, UsageError, WorkerFailure
from hvdtrain.horovod_build.installed import BUILD_COMMAND
from hvdtrain.host.environment import for_children
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.host.launcher import host_name
from hvdtrain.host.launches import stated_launch
from hvdtrain.launching.channel import Channel, opened
from hvdtrain.launching.running import run_command

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
