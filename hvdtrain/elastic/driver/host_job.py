"""An elastic job in slots of hosts, where its driver starts the workers: that of `horovodrun`."""

import os
import resource
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from horovod.runner.common.util import config_parser, safe_shell_exec

from hvdtrain.elastic.driver.clusters import HostCluster
from hvdtrain.elastic.driver.driver import Driver
from hvdtrain.elastic.driver.hosts import HostWatch, ScriptHosts, parse_hosts
from hvdtrain.elastic.driver.records import make_limits, say
from hvdtrain.errors import EXIT_STOPPED, DiscoveryError, UsageError
from hvdtrain.host.hostfile import HostSlots

_STOPS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)  # as the launcher of other jobs takes them
_OPEN_FILES = 8192


def run_host_job(args: Any) -> None:
    """Run an elastic job, and end the launcher with its exit code."""
    try:
        code = _run(args)
    except UsageError as error:
        raise ValueError(str(error).replace("\n", "\n  ")) from None
    except DiscoveryError as error:
        words = ["python", "-m", "hvdtrain", "doctor", "--host-discovery-script", args.host_discovery_script]
        words += ["--slots-per-host", str(args.slots)] if args.slots else []
        say(f"{error}\nTo check it: {shlex.join(words)}")
        code = error.exit_code
    if code:
        sys.exit(code)


def _run(args: Any) -> int:
    if not args.command:
        raise UsageError("there is no command to run", "Write it after the options: python -m hvdtrain ...")
    find_hosts, close = _hosts(args)
    limits = make_limits(
        args.num_proc,
        sum(one.slots for one in find_hosts()),
        is_fixed=not args.host_discovery_script,
        least=args.min_num_proc,
        most=args.max_num_proc,
        start_timeout=args.start_timeout,
        elastic_timeout=args.elastic_timeout,
        reset_limit=args.reset_limit,
        cooldown=None if args.cooldown_range is None else tuple(args.cooldown_range),
    )
    interface_names = sorted(args.nics or ())
    if interface_names:  # the workers use them
        os.environ["HOROVOD_GLOO_IFACE"] = interface_names[0]
        os.environ["NCCL_SOCKET_IFNAME"] = ",".join(interface_names)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a worker takes several open files here
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _OPEN_FILES)), hard))
    environ, job_key = dict(os.environ), secrets.token_hex(32)
    config_parser.set_env_from_args(environ, args)
    cluster = HostCluster(
        args.command,
        job_key,
        find_hosts,
        environ=environ,
        interface_names=interface_names,
        is_fixed=not args.host_discovery_script,
        verbose=2 if args.verbose else 0,
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
        output_filename=args.output_filename,
        prefix_output_with_timestamp=args.prefix_output_with_timestamp,
    )
    driver = Driver(limits, cluster, job_key, command=shlex.join(args.command))
    try:
        return _run_driver(driver)
    finally:
        close()


def _run_driver(driver: Driver) -> int:
    """Run the job to its end, say how it ended unless a worker said it, and return its exit code.

    SIGTERM, SIGUSR2 and SIGHUP stop the job in order, SIGINT at once; SIGUSR1 lets workers save.
    """

    def stop(number: int, frame: Any) -> None:
        driver.signal(number)

    signal.signal(signal.SIGINT, stop)
    for number in _STOPS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as it is under nohup
            signal.signal(number, stop)
    signal.signal(signal.SIGUSR1, lambda number, frame: safe_shell_exec.pass_on(signal.SIGUSR1))
    end = driver.run()
    if end.problem:
        say("\n".join(text for text in (end.problem, end.remedy) if text))
    elif end.exit_code == EXIT_STOPPED:
        say(f"the workers stopped on request and can be resumed (exit code {EXIT_STOPPED}).")
    return end.exit_code


def _hosts(args: Any) -> tuple[Callable[[], Sequence[HostSlots]], Callable[[], None]]:
    """Return what gives the hosts that there are now, and what ends looking for them."""
    slots_per_host = 1 if args.slots is None else args.slots
    if slots_per_host < 1:
        raise UsageError(f"--slots-per-host {slots_per_host}: a number of slots, 1 or more, is expected")
    if args.host_discovery_script:
        watch = HostWatch(ScriptHosts(args.host_discovery_script, slots_per_host), say)
        watch.start()
        return watch.hosts, watch.close
    try:
        hosts = parse_hosts(args.hosts.replace(",", "\n"), slots_per_host)
    except DiscoveryError as error:
        raise UsageError(f"-H {args.hosts}: {error.problem}", "Write host1:2,host2:2.") from None
    return lambda: hosts, lambda: None
