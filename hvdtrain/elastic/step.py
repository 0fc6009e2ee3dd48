"""An elastic job whose workers another launcher starts: `python -m hvdtrain elastic ... -- srun ...`."""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hvdtrain.elastic.crashes import COMMAND_NOT_FOUND
from hvdtrain.elastic.driver.clusters import StepCluster
from hvdtrain.elastic.driver.driver import Driver
from hvdtrain.elastic.limits import LimitOptions, make_limits
from hvdtrain.elastic.notices import say
from hvdtrain.elastic.running import report, run_driver
from hvdtrain.errors import EXIT_ENVIRONMENT, UsageError
from hvdtrain.host.processes import start_group

_NAME = "hvdtrain elastic"
_WORKERS_SECONDS = 5.0  # from the end of the command to that of the job
_END_SECONDS = 10.0  # from the end of the job to that of the command
_TERM_SECONDS = 10.0


def run_step(command: Sequence[str], given: LimitOptions, interface_names: Sequence[str]) -> int:
    """Run an elastic job, and return its exit code.

    Args:
        command: what starts all workers.
        given: the limits that the user gave.
        interface_names: the network interfaces that the user chose; empty for all.

    Raises:
        UsageError: If the limits contradict each other, or there is no such command.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no command {command[0]!r}", "Write the command after --: -- srun ...")
    limits = make_limits(given, 0, os.environ, is_fixed=True, can_start=False)
    if interface_names:
        os.environ["HOROVOD_GLOO_IFACE"] = interface_names[0]
    job_key = secrets.token_hex(32)
    cluster = StepCluster(job_key, os.environ, interface_names=interface_names, name=_NAME)
    driver = Driver(limits, cluster, job_key)
    step = _Step(command, cluster.environment(), driver)
    try:
        outcome = run_driver(driver, step.save)
    finally:
        step.end()
    return step.early_code() or report(_NAME, outcome)


class _Step:
    """The command that starts all workers.

    Args:
        command: the command.
        environ: its environment.
        driver: is stopped if the command ends before the job does.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], driver: Driver) -> None:
        self._command, self._driver = shlex.join(command), driver
        self._process = start_group(command, stdin=None, env=environ)
        self._job_is_over = threading.Event()
        self._ended_early = False
        threading.Thread(target=self._follow, name="step", daemon=True).start()

    def save(self) -> None:
        """Pass the request to save on."""
        self._send(signal.SIGUSR1)

    def end(self) -> None:
        """Let the command end: by itself, then by SIGTERM, then by SIGKILL."""
        self._job_is_over.set()
        for number, seconds in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, _TERM_SECONDS)):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                return
            self._send(number)
        self._process.wait()

    def early_code(self) -> int:
        """Return the exit code of a job whose command ended before it; 0 if it did not."""
        if not self._ended_early:
            return 0
        return self._process.returncode if self._process.returncode > 0 else EXIT_ENVIRONMENT

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _follow(self) -> None:
        code = self._process.wait()
        if self._job_is_over.wait(_WORKERS_SECONDS):
            return
        self._ended_early = True
        say(_NAME, _describe_end(self._command, code, self._driver.has_heard_workers))
        while not self._job_is_over.wait(1.0):  # the second time, the driver waits for nobody
            self._driver.signal(signal.SIGTERM)


def _describe_end(command: str, code: int, has_workers: bool) -> str:
    """Return that the command ended before the job did, and what to do.

    Args:
        command: the command.
        code: its exit code; that of a signal is negative.
        has_workers: whether a worker of the job had come.
    """
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    not_found = " (the shell did not find a command)" if code == COMMAND_NOT_FOUND else ""
    if has_workers:
        return f"`{command}` ended {how}{not_found} before the job did"
    return (
        f"`{command}` ended {how}{not_found}, and no worker had come\n"
        "It must start python -m hvdtrain for each worker: -- srun ... python -m hvdtrain --framework torch"
    )
