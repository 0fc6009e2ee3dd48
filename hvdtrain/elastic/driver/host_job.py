"""An elastic job in slots of hosts, where its driver starts the workers: that of `horovodrun`."""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from horovod.runner.common.util import config_parser, safe_shell_exec

from hvdtrain.elastic.driver.cluster import LimitOptions, make_limits, say
from hvdtrain.elastic.driver.clusters import HostCluster, StepCluster
from hvdtrain.elastic.driver.driver import Driver, Outcome
from hvdtrain.elastic.driver.hosts import FixedHosts, HostWatch, ScriptHosts, parse_hosts
from hvdtrain.elastic.driver.processes import StartOptions
from hvdtrain.elastic.driver.ranks import COMMAND_NOT_FOUND
from hvdtrain.errors import EXIT_ENVIRONMENT, EXIT_STOPPED, DiscoveryError, UsageError
from hvdtrain.host.processes import start_group

_STOPS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)  # as the launcher of other jobs takes them


def run_driver(driver: Driver, save: Callable[[], None]) -> Outcome:
    """Run a job to its end. Only the main thread may call it.

    SIGTERM, SIGUSR2 and SIGHUP stop the job in order, SIGINT at once; SIGUSR1 lets workers save.

    Args:
        driver: the driver, which listens.
        save: passes SIGUSR1 on to the workers.
    """

    def stop(number: int, frame: Any) -> None:
        driver.signal(number)

    signal.signal(signal.SIGINT, stop)
    for number in _STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as it is under nohup
            signal.signal(number, stop)
    signal.signal(signal.SIGUSR1, lambda number, frame: save())
    return driver.run()


def report(name: str, outcome: Outcome) -> int:
    """Say how a job ended unless a worker said it, and return its exit code."""
    if outcome.problem:
        say(name, "\n".join(text for text in (outcome.problem, outcome.remedy) if text))
    elif outcome.exit_code == EXIT_STOPPED:
        say(name, f"the workers stopped on request and can be resumed (exit code {EXIT_STOPPED}).")
    return outcome.exit_code


_STEP_NAME = "hvdtrain elastic"
_WORKERS_SECONDS = 5.0  # from the end of the command to that of the job
_STEP_END_SECONDS = 10.0  # from the end of the job to that of the command
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
    cluster = StepCluster(job_key, os.environ, interface_names=interface_names, name=_STEP_NAME)
    driver = Driver(limits, cluster, job_key)
    step = _Step(command, cluster.environment(), driver)
    try:
        outcome = run_driver(driver, step.save)
    finally:
        step.end()
    return step.early_code() or report(_STEP_NAME, outcome)


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
        for number, seconds in ((signal.SIGTERM, _STEP_END_SECONDS), (signal.SIGKILL, _TERM_SECONDS)):
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
        say(_STEP_NAME, _describe_end(self._command, code, self._driver.has_heard_workers))
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


_NAME = "horovodrun"
_END_SECONDS = 5.0  # for processes to end when the job has


def run_host_job(args: Any) -> None:
    """Run an elastic job, and end the launcher with its exit code.

    Args:
        args: the arguments of `horovodrun`, as it parsed them.

    Raises:
        ValueError: If they contradict each other, with which `horovodrun` ends with exit code 2.
    """
    try:
        code = _run(args)
    except UsageError as error:
        raise ValueError(str(error).replace("\n", "\n  ")) from None
    except DiscoveryError as error:
        say(_NAME, f"{error}\nTo check it: {_doctor_command(args)}")
        code = error.exit_code
    if code:
        sys.exit(code)


def _run(args: Any) -> int:
    if not args.command:
        raise UsageError("there is no command to run", "Write it after the options: python -m hvdtrain ...")
    is_fixed = not args.host_discovery_script
    watch = _host_watch(args)
    watch.start()
    slots = sum(one.slots for one in watch.hosts())
    limits = make_limits(_limit_options(args), slots, os.environ, is_fixed=is_fixed)
    if args.nics:
        os.environ.update(_interface_variables(args.nics))  # the workers use them
    job_key = secrets.token_hex(32)
    cluster = HostCluster(
        _start_options(args),
        job_key,
        watch.hosts,
        interface_names=sorted(args.nics or ()),
        is_fixed=is_fixed,
        name=_NAME,
    )
    driver = Driver(limits, cluster, job_key, command=shlex.join(args.command))
    try:
        return report(_NAME, run_driver(driver, save=lambda: safe_shell_exec.pass_on(signal.SIGUSR1)))
    finally:
        watch.close()
        cluster.close(_END_SECONDS)


def _host_watch(args: Any) -> HostWatch:
    slots_per_host = 1 if args.slots is None else args.slots
    if slots_per_host < 1:
        raise UsageError(f"--slots-per-host {slots_per_host}: a number of slots, 1 or more, is expected")

    def note(text: str) -> None:
        say(_NAME, text)

    if args.host_discovery_script:
        return HostWatch(ScriptHosts(args.host_discovery_script, slots_per_host, note=note), note)
    try:
        parsed = parse_hosts(args.hosts.replace(",", "\n"), slots_per_host)
    except DiscoveryError as error:
        raise UsageError(f"-H {args.hosts}: {error.problem}", "Write host1:2,host2:2.") from None
    for text in parsed.notes:
        note(text)
    return HostWatch(FixedHosts(parsed.hosts), note)


def _doctor_command(args: Any) -> str:
    words = ["python", "-m", "hvdtrain", "doctor", "--host-discovery-script", args.host_discovery_script]
    return shlex.join([*words, *(["--slots-per-host", str(args.slots)] if args.slots else [])])


def _limit_options(args: Any) -> LimitOptions:
    return LimitOptions(
        wanted=args.num_proc,
        least=args.min_num_proc,
        most=args.max_num_proc,
        start_timeout=args.start_timeout,
        elastic_timeout=args.elastic_timeout,
        reset_limit=args.reset_limit,
        cooldown=None if args.cooldown_range is None else tuple(args.cooldown_range),
    )


def _interface_variables(names: set[str]) -> dict[str, str]:
    return {"HOROVOD_GLOO_IFACE": min(names), "NCCL_SOCKET_IFNAME": ",".join(sorted(names))}


def _start_options(args: Any) -> StartOptions:
    environ = dict(os.environ)
    config_parser.set_env_from_args(environ, args)
    return StartOptions(
        command=args.command,
        environ=environ,
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
        output_folder=args.output_filename,
        has_timestamps=args.prefix_output_with_timestamp,
        verbose=args.verbose,
    )
