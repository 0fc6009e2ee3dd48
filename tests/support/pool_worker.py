"""One worker of a pool: it runs the cases that come over a socket, one after the other, in this process.

The client (pool.py) sends a case to every worker of the job itself, so that an idle pool waits for
its sockets and for no collective. A case that raises ends the worker: its process may hold anything.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

TESTS = Path(__file__).resolve().parents[1]
_THREAD_SECONDS = 60  # within which the threads of a case end


def main() -> None:
    """Serve until the client closes the connection."""
    sys.path[0] = str(TESTS)  # in place of this file's folder
    # as jobs have it (host/environment.py); the first case to start Horovod may start it by itself
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    _import_framework(sys.argv[2])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{sys.argv[1]}")
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        _send(stream, {"rank": _rank(), "pid": os.getpid()})
        for line in stream:
            answer = _answer(json.loads(line))
            _send(stream, answer)
            if answer["error"]:
                os._exit(1)  # without a last collective: the other workers may be anywhere


def _import_framework(flag: str) -> None:
    """Import a framework, if it is one, as hvdtrain does; later collections leave out what is there then."""
    from hvdtrain.backends import quick_imports
    from hvdtrain.host.frameworks import FRAMEWORKS

    if flag not in FRAMEWORKS:
        return
    with quick_imports():
        importlib.import_module(FRAMEWORKS[flag].module)
    gc.freeze()


def _rank() -> int:
    return int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def _send(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _answer(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case; return its value, or its error as a traceback."""
    value, error = None, ""
    with _output_to(Path(case["capture"])), _as_before(Path(case["cwd"]), case["environ"]):
        faulthandler.dump_traceback_later(case["seconds"])
        try:
            value = _function(case["function"])(**case["arguments"])
            _check_threads()
            _check_readers()
        except BaseException:  # SystemExit included: a case that ends its process is no success
            error = traceback.format_exc()
            sys.stderr.write(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
    gc.collect()
    return {"value": value, "error": error, "number": case["number"]}


def _function(name: str) -> Callable[..., Any]:
    """Import the function that ``module:function`` or ``path/to/file.py:function`` names."""
    place, _, attribute = name.rpartition(":")
    if not place.endswith(".py"):
        function: Callable[..., Any] = getattr(importlib.import_module(place), attribute)
        return function
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(place).parent))
    spec.loader.exec_module(module)
    loaded: Callable[..., Any] = getattr(module, attribute)
    return loaded


@contextmanager
def _output_to(folder: Path) -> Iterator[None]:
    """Context in which standard output and error, native code included, go to files of this rank."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    _flush()
    for (number, _), name in zip(kept, ("stdout", "stderr"), strict=True):
        file = os.open(folder / f"{name}-{_rank()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        _flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what native code has written through C's own streams


@contextmanager
def _as_before(cwd: Path, environ: dict[str, str]) -> Iterator[None]:
    """Context of one case: its folder and environment; afterwards the process is as it was before."""
    before = os.getcwd(), dict(os.environ), list(sys.path), list(sys.argv), sys.excepthook
    modules = set(sys.modules)
    os.chdir(cwd)
    os.environ.update(environ)
    try:
        yield
    finally:
        os.chdir(before[0])
        for name in set(os.environ) - set(before[1]):
            del os.environ[name]
        os.environ.update(before[1])
        sys.path[:], sys.argv[:], sys.excepthook = before[2:]
        for name in set(sys.modules) - modules:
            if _belongs_to_a_case(sys.modules[name], cwd):
                del sys.modules[name]


def _belongs_to_a_case(module: Any, cwd: Path) -> bool:
    """Whether a module must be imported anew by the next case, whose file of that name may differ."""
    file = getattr(module, "__file__", None)
    return file is not None and any(Path(file).is_relative_to(folder) for folder in (cwd, TESTS))


def _check_threads() -> None:
    """Raise AssertionError if the case left a thread of Python's that is no daemon."""
    others = [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    deadline = time.monotonic() + _THREAD_SECONDS
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in others if thread.is_alive()]
    assert not left, f"the case left threads: {left}"


def _check_readers() -> None:
    """Raise AssertionError if the case left a process that reads samples."""
    deadline = time.monotonic() + _THREAD_SECONDS
    while (left := _readers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"the case left readers: {left}"


def _readers() -> list[int]:
    left = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and any("reader_process" in w for w in child.cmdline()):
                left.append(child.pid)
    return left


if __name__ == "__main__":
    main()
