"""The command, and its three ways to reach the hosts: none (alone), ssh, or the launcher that started it."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rich.console import Console

from hvdtrain.elastic.driver.hosts import ScriptHosts
from hvdtrain.errors import EXIT_DONE, EXIT_ENVIRONMENT, DiscoveryError, UsageError
from hvdtrain.horovod_build.installed import installed_build
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.hostfile import HostSlots, parse_host_list, read_host_file
from hvdtrain.host.launcher import (
    TORCHRUN,
    check_launch_is_seen,
    launched_rank,
    open_console,
    stated_launch,
    workers_on_this_host,
)
from hvdtrain.host.processes import end_with_parent, run_limited
from hvdtrain.tools.doctor.checks import add_horovod_result, diagnose
from hvdtrain.tools.doctor.collect import CheckOptions, collect, collect_host_info
from hvdtrain.tools.doctor.report import Diagnosis, Finding, Host, Report, show, to_json
from hvdtrain.tools.doctor.ssh import Coordinator, PipeTransport, SshOptions, run_agent
from hvdtrain.tools.doctor.transports import Transport, open_transport, wait_until

_START_SECONDS = 60.0
_LATE = {"error": f"it did not finish within {_START_SECONDS:.0f} s"}
_STEP_SECONDS = 20.0
_END_SECONDS = 2.0  # until a child that took too long has ended, or rank 0 has printed
_PREFIX = "hvdtrain-horovod:"
_MAX_WIDTH = 100
_LOCAL_RANKS = (
    "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMIX_LOCAL_RANK", "SLURM_LOCALID",
)  # fmt: skip
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def run_doctor(options: Mapping[str, Any]) -> int:
    """Run the command with its options, by name, and return its exit code."""
    if options["agent"]:
        run_agent()
        return EXIT_DONE
    hostfile, hosts, script = options["hostfile"], options["hosts"], options["host_discovery_script"]
    if sum(map(bool, (hostfile, hosts, script))) > 1:
        raise UsageError("--hostfile, -H and --host-discovery-script all name hosts", "Give one of them.")
    frameworks = (options["framework"],) if options["framework"] else ("torch", "tf")
    checked = CheckOptions(frameworks, options["run_dir"], options["timeout"])
    if not any((hostfile, hosts, script)):
        return _check_here(checked, options["as_json"])
    if script:
        named: list[HostSlots] = ScriptHosts(script, options["slots_per_host"]).find()
        if not named:
            remedy = "An elastic job waits for hosts. Start at least one, then run the doctor again."
            raise DiscoveryError(f"host discovery script {script}: it names no host", remedy)
    else:
        named = read_host_file(hostfile) if hostfile else parse_host_list(hosts)
    if launched_rank() is not None:
        raise UsageError(
            "the hosts are named for a check before a launch, but a launcher has started this process",
            "Run the doctor without the launcher, or without these options.",
        )
    coordinator = Coordinator(named, checked, SshOptions(options["ssh_port"], options["ssh_identity_file"]))
    coordinator.run()
    infos = coordinator.answers.get("host info") or [None] * len(named)
    found = tuple(
        Host(host.name, host.slots, infos[index], coordinator.problems.get(index))
        for index, host in enumerate(named)
    )
    report = Report(found, tuple(range(len(named))), coordinator.answers, os.getcwd())
    diagnosis = diagnose(report, PipeTransport.title)
    _print(diagnosis, options["as_json"])
    return diagnosis.exit_code


def _check_here(options: CheckOptions, as_json: bool) -> int:
    """Collective under a launcher. Check this host, or all hosts of the job, and return the exit code."""
    launch = stated_launch()
    if launch is not None and launch.launcher == TORCHRUN and launch.size > 1:
        raise UsageError(
            "the doctor cannot check the hosts of a job of torchrun",
            "Run it without a launcher: python -m hvdtrain doctor, with --hostfile FILE for several hosts; "
            f"or under horovodrun -np {launch.size}.",
            everywhere=True,
        )
    name = os.environ.get("HOROVOD_HOSTNAME", "") or os.uname().nodename
    local_size = int(_first_of(_LOCAL_SIZES, "0")) or workers_on_this_host(os.environ) or 1
    host_info = collect_host_info(options, name, local_size, _first_of(_LOCAL_RANKS, "0") == "0")
    transport = open_transport()
    build = installed_build()
    check_launch_is_seen(launch, transport.size, transport.index, (build and build.mpi) or "")
    if transport.size > 1 and not transport.index:
        # the launcher ends the job: print what is known so far
        signal.signal(signal.SIGTERM, lambda *_: transport.stop_waiting.set())
    collect(transport, options, host_info)
    report = _make_report(transport, host_info)
    diagnosis = diagnose(report, transport.title)
    loading = [
        name
        for name in options.frameworks
        if all(info["software"]["horovod"].get(name) == "" for _, info in report.responding)
    ]
    framework = loading[0] if transport.size > 1 and not diagnosis.exit_code and loading else ""
    framework = transport.allgather("framework", framework, _STEP_SECONDS)[0]  # rank 0 decides
    if framework:
        result = start_horovod(transport, framework)
        host_of = [info["name"] if info else "" for info in transport.answers["host info"]]
        diagnosis = add_horovod_result(diagnosis, result, host_of)
    code = diagnosis.exit_code if transport.index == 0 else 0
    if transport.index == 0:
        _print(diagnosis, as_json)
    if transport.is_stuck:
        sys.stdout.flush()
        time.sleep(_END_SECONDS if transport.index else 0)
        os._exit(EXIT_ENVIRONMENT)
    return code


def _make_report(transport: Transport, own_info: dict[str, Any]) -> Report:
    """Return the report of a launched job; an agent that did not answer counts as a host of its own."""
    hosts = {}
    for index, info in enumerate(transport.answers["host info"]):
        if info is None:
            name = f"host of rank {index}"
            remedy = "Look at the output of its worker. Then run: python -m hvdtrain doctor --hostfile FILE."
            found = "its worker did not report in time"
            hosts[index] = Host(name, 1, None, Finding(name, "doctor", "fail", found, remedy))
        elif info["is_leader"]:
            hosts[index] = Host(info["name"], info["slots"], info)
    return Report(tuple(hosts.values()), tuple(hosts), transport.answers, own_info.get("directory", ""))


def _print(diagnosis: Diagnosis, as_json: bool) -> None:
    if as_json:
        print(to_json(diagnosis), flush=True)
        return
    console = open_console()
    if not console.is_terminal or console.width > _MAX_WIDTH:
        console = Console(file=console.file, force_terminal=console.is_terminal, width=_MAX_WIDTH)
    show(diagnosis, console)
    console.file.flush()


def _first_of(names: tuple[str, ...], otherwise: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), otherwise)


def start_horovod(transport: Transport, framework: str) -> dict[str, Any]:
    """Collective. Start Horovod on all workers, for one all-reduce."""
    result: dict[str, Any] = {}

    def run() -> None:
        try:
            # Gloo aborts its process if it cannot connect, so it runs in a child. MPI has started here.
            is_here = transport.title == "MPI"
            result.update(_reduce(framework) if is_here else _reduce_in_child(framework))
        except Exception as error:  # whatever Horovod and the framework raise
            result["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(
        lambda: not thread.is_alive() or transport.stop_waiting.is_set(), _START_SECONDS + _END_SECONDS
    )
    is_late = thread.is_alive()
    results = transport.allgather("horovod", _LATE if is_late else result, _START_SECONDS)
    transport.is_stuck |= is_late
    errors = [(one or {"error": "it ended"}).get("error", "") for one in results]
    return {"errors": errors} if any(errors) else dict(results[0])


def _reduce_in_child(framework: str) -> dict[str, Any]:
    done = run_limited([sys.executable, "-m", __name__, framework, str(os.getpid())], _START_SECONDS)
    for line in done.output.splitlines():
        if line.startswith(_PREFIX):
            result: dict[str, Any] = json.loads(line.removeprefix(_PREFIX))
            return result
    if (code := done.code) is None:
        return _LATE
    # Gloo prints its exception before it aborts the process
    lines = ["", *(line.strip() for line in done.errors.splitlines() if line.strip())]
    what = next((line for line in lines if line.startswith("what():")), lines[-1])
    text = re.sub(r"\[[^]]*\] ", "", what.removeprefix("what():").strip())[:200]
    ended = f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return {"error": f"{ended}: {text}" if text else ended}


def _reduce(framework: str) -> dict[str, Any]:
    import numpy as np

    hvd = import_module(FRAMEWORKS[framework].horovod)
    hvd.init()
    tensor = (
        import_module("torch").from_numpy if framework == "torch" else import_module("tensorflow").constant
    )
    hvd.allreduce(tensor(np.zeros(256, "float32")), op=hvd.Sum, name="hvdtrain.doctor")
    return {"workers": hvd.size(), "controller": "MPI" if hvd.mpi_enabled() else "Gloo"}


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    print(_PREFIX + json.dumps(_reduce(sys.argv[1])), flush=True)
