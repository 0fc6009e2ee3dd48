"""What pools run: functions that every worker of a job calls in its own process."""

import contextlib
import io
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import pytest

STACK_SECONDS = 60  # after which pytest shows where a test is; it captures what the pool's worker would show


class _Ended(BaseException):
    """The command line ended its process with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Context after which signals are handled as before it: a command that ends its process ignores them."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def command_line(words: list[str]) -> int:
    """Do what ``python -m hvdtrain`` does with these words but end the process; return its exit code."""
    from hvdtrain.cli import main

    end = os._exit

    def end_this_case(code: int) -> NoReturn:
        if threading.current_thread() is not threading.main_thread():
            end(code)  # a worker that waits for others in vain, or whose host is gone, really ends
        raise _Ended(code)

    with (
        _handlers_kept(),
        mock.patch.object(sys, "argv", ["hvdtrain", *words]),
        mock.patch.object(os, "_exit", end_this_case),
    ):
        try:
            main()
        except _Ended as ended:
            return ended.code
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def training_command(words: list[str]) -> tuple[int, bool]:
    """Do so, but let Horovod stay after an error that all workers have, as ``hvdtrain.train`` does.

    Returns:
        The exit code, and whether this worker has left Horovod, which cannot start again.
    """
    from hvdtrain.jobs import train
    from hvdtrain.jobs.opening import start

    def started(*arguments: Any, **options: Any) -> Any:
        return start.started(*arguments, **{**options, "stays": True})

    left: list[object] = []
    with (
        mock.patch.object(train, "started", started),
        mock.patch.object(start.failures, "leave_open"),
        mock.patch.object(start, "forbid_restart", left.append),
    ):
        return command_line(words), bool(left)


def commands(commands: list[list[str]]) -> list[tuple[str, str]]:
    """Run commands of hvdtrain; return what each printed, and its error or nothing."""
    from hvdtrain.cli import cli
    from hvdtrain.errors import HvdtrainError

    results = []
    for words in commands:
        printed, problem = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(printed):
                cli(words, standalone_mode=False)
        except HvdtrainError as error:
            problem = f"{error.problem}\n{error.remedy}"
        results.append((printed.getvalue(), problem))
    return results


def script(path: str, arguments: list[str]) -> None:
    """Run a script, as Python does."""
    with mock.patch.object(sys, "argv", [path, *arguments]):
        runpy.run_path(path, run_name="__main__")


def suite(path: str, framework: str, marks: str = "") -> int:
    """Run a file of tests: every worker runs the same of them, on a backend that they share."""
    os.environ["HVDTRAIN_TEST_FRAMEWORK"] = framework
    os.environ["HVDTRAIN_TESTS_REQUIRED"] = "0"
    stacks = ["-o", f"faulthandler_timeout={STACK_SECONDS}"]
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *stacks, "-m", marks, path])
    assert code == pytest.ExitCode.OK, f"the suite ended with {code!r}"
    return int(code)
