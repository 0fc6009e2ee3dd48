"""An elastic job in slots of hosts, where its driver starts the workers: that of `horovodrun`."""

import os
import secrets
import shlex
import signal
import sys
from typing import Any

from horovod.runner.common.util import config_parser, safe_shell_exec

from hvdtrain.elastic.driver.clusters import HostCluster
from hvdtrain.elastic.driver.driver import Driver
from hvdtrain.elastic.driver.hosts import FixedHosts, HostWatch, ScriptHosts, parse_hosts
from hvdtrain.elastic.driver.processes import StartOptions
from hvdtrain.elastic.limits import LimitOptions, make_limits
from hvdtrain.elastic.notices import say
from hvdtrain.elastic.running import report, run_driver
from hvdtrain.errors import DiscoveryError, UsageError

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
