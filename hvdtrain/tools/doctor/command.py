"""The command, and its three ways to reach the hosts: none (alone), ssh, or the launcher that started it."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any

from rich.console import Console

from hvdtrain.errors import EXIT_DONE, UsageError
from hvdtrain.horovod_build import installed_build
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
from hvdtrain.tools.doctor.checks_network import Diagnosis, add_horovod_result, diagnose
from hvdtrain.tools.doctor.collect import (
    Agent,
    CheckOptions,
    Transport,
    collect,
    collect_host_info,
    wait_until,
)
from hvdtrain.tools.doctor.coordinator import Coordinator, SshOptions, check_discovery
from hvdtrain.tools.doctor.launcher_transports import MpiTransport, Rank0Transport, open_transport
from hvdtrain.tools.doctor.remote_agent import PipeTransport, run_agent
from hvdtrain.tools.doctor.report import Finding, Host, Report
from hvdtrain.tools.doctor.software import import_libraries
from hvdtrain.tools.doctor.speed import SIZES
from hvdtrain.tools.doctor.table import show, to_json

_START_SECONDS = 60.0
_ALLREDUCE_SECONDS, _SIZE_SECONDS, _REPEATS = 60.0, 0.4, 20
_PREFIX = "hvdtrain-horovod:"
_TIMED_OUT = "it did not finish within {:.0f} s"


def start_horovod(
    transport: Transport, framework: str, speed: bool, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Collective. Start Horovod on all workers, and measure its all-reduce.

    Args:
        transport: between the workers.
        framework: "torch" or "tf".
        speed: whether to measure several message sizes instead of one.
        should_stop: returns whether there is no time left to wait.

    Returns:
        ``seconds`` of an all-reduce by size in bytes, ``workers`` and ``controller``. If Horovod did not
        start: ``errors``, the error of each rank, an empty text if it had none.
    """
    limit = _START_SECONDS + (_ALLREDUCE_SECONDS if speed else 0)
    # Gloo aborts its process if it cannot connect, so it runs in a child. MPI has started in this process.
    run = _run_in_process if isinstance(transport, MpiTransport) else _run_in_child
    result = run(framework, speed, limit, should_stop)
    results = transport.allgather("horovod", result, limit)
    errors = [(one or {"error": "it ended"}).get("error", "") for one in results]
    if any(errors):
        return {"errors": errors}
    slowest = {size: max(one["seconds"][size] for one in results) for size in results[0]["seconds"]}
    return {**results[0], "seconds": slowest}


def _run_in_process(
    framework: str, speed: bool, limit_seconds: float, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    result: dict[str, Any] = {}

    def run() -> None:
        try:
            result.update(_measure(framework, speed))
        except Exception as error:  # whatever Horovod and the framework raise
            result["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: not thread.is_alive() or should_stop(), limit_seconds)
    return {"error": _TIMED_OUT.format(limit_seconds)} if thread.is_alive() else result


def _run_in_child(
    framework: str, speed: bool, limit_seconds: float, should_stop: Callable[[], bool]
) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, framework, "speed" if speed else "start"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
        try:
            if not wait_until(lambda: child.poll() is not None or should_stop(), limit_seconds):
                return {"error": _TIMED_OUT.format(limit_seconds)}
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        errors.seek(0)
        for line in out.read().decode(errors="replace").splitlines():
            if line.startswith(_PREFIX):
                result: dict[str, Any] = json.loads(line.removeprefix(_PREFIX))
                return result
        return {"error": _exit_reason(child.returncode, errors.read().decode(errors="replace"))}


def _exit_reason(code: int, stderr: str) -> str:
    """Return why the child failed. Gloo prints its exception before it aborts the process."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    what = next((line for line in lines if line.startswith("what():")), lines[-1] if lines else "")
    ended = f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    text = re.sub(r"\[[^]]*\] ", "", what.removeprefix("what():").strip())
    return f"{ended}: {text[:200]}" if text else ended


def _measure(framework: str, speed: bool) -> dict[str, Any]:
    hvd = import_module(FRAMEWORKS[framework].horovod)
    hvd.init()
    seconds: dict[str, float] = {}
    for size in SIZES if speed else SIZES[:1]:
        tensor = _tensor(framework, size)
        taken: list[float] = []
        repeats = _REPEATS
        while len(taken) < repeats:
            start = time.perf_counter()
            hvd.allreduce(tensor, op=hvd.Sum, name=f"hvdtrain.doctor.{size}")
            taken.append(time.perf_counter() - start)
            if (
                len(taken) == 1
            ):  # the first one includes negotiation; all workers must agree on the number of repeats
                repeats = _agreed_repeats(hvd, framework, taken[0])
        seconds[str(size)] = median(taken[1:])
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"
    return {"seconds": seconds, "workers": hvd.size(), "controller": controller}


def _agreed_repeats(hvd: Any, framework: str, first_seconds: float) -> int:
    import numpy as np

    own_repeats = max(2, min(_REPEATS, int(_SIZE_SECONDS / max(first_seconds, 1e-6))))
    least = hvd.allreduce(_tensor(framework, 4, own_repeats), op=hvd.Min, name="hvdtrain.doctor.repeats")
    return int(np.asarray(least)[0])


def _tensor(framework: str, size: int, value: float = 0.0) -> Any:
    import numpy as np

    array = np.full(size // 4, value, "float32")
    if framework == "torch":
        return import_module("torch").from_numpy(array)
    return import_module("tensorflow").constant(array)


_MAX_WIDTH = 100
_STEP_SECONDS = 20.0
_LOCAL_RANKS = (
    "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMIX_LOCAL_RANK", "SLURM_LOCALID",
)  # fmt: skip
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def run_doctor(options: Mapping[str, Any]) -> int:
    """Run the command, and return its exit code.

    Args:
        options: the options of the command, by name.

    Raises:
        UsageError: If options contradict each other, or the host file is invalid.
    """
    if options["agent"]:
        run_agent()
        return EXIT_DONE
    hostfile, hosts, script = options["hostfile"], options["hosts"], options["host_discovery_script"]
    if sum(map(bool, (hostfile, hosts, script))) > 1:
        raise UsageError("--hostfile, -H and --host-discovery-script all name hosts", "Give one of them.")
    framework = options["framework"]
    check_options = CheckOptions(
        frameworks=(framework,) if framework else ("torch", "tf"),
        run_dir=options["run_dir"],
        speed=not options["quick"],
        timeout_seconds=options["timeout"],
    )
    ssh = SshOptions(options["ssh_port"], options["ssh_identity_file"])
    if script:
        named, findings = check_discovery(script, options["slots_per_host"])
        return check_over_ssh(named, check_options, ssh, options["as_json"], findings)
    if not hostfile and not hosts:
        return check_here(check_options, options["as_json"])
    named = read_host_file(hostfile) if hostfile else parse_host_list(hosts)
    return check_over_ssh(named, check_options, ssh, options["as_json"])


def check_over_ssh(
    hosts: list[HostSlots],
    options: CheckOptions,
    ssh: SshOptions,
    as_json: bool,
    findings: Sequence[Finding] = (),
) -> int:
    """Check hosts over ssh, before a launch, and return the exit code.

    Args:
        hosts: the hosts.
        options: what is checked.
        ssh: how to log in.
        as_json: whether to print a document instead of a table.
        findings: what was found before; they come first.

    Raises:
        UsageError: If a launcher has started this process.
    """
    if launched_rank() is not None:
        raise UsageError(
            "the hosts are named for a check before a launch, but a launcher has started this process",
            "Run the doctor without the launcher, or without these options.",
        )
    coordinator = Coordinator(hosts, options, ssh)
    coordinator.run()
    infos = coordinator.answers.get("host info") or [None] * len(hosts)
    checked = tuple(
        Host(host.name, host.slots, infos[index], coordinator.problems.get(index))
        for index, host in enumerate(hosts)
    )
    report = Report(checked, tuple(range(len(hosts))), coordinator.answers, os.getcwd())
    diagnosis = diagnose(report, PipeTransport.title)
    diagnosis = replace(diagnosis, findings=(*findings, *diagnosis.findings))
    _print(diagnosis, as_json)
    return diagnosis.exit_code


def check_here(options: CheckOptions, as_json: bool) -> int:
    """Collective under a launcher. Check this host, or all hosts of the job, and return the exit code.

    Raises:
        UsageError: If torchrun started this process.
        EnvironmentFault: If a launcher started it beside others that a job would not see.
    """
    launch = stated_launch()
    if launch is not None and launch.launcher == TORCHRUN and launch.size > 1:
        raise UsageError(
            "the doctor cannot check the hosts of a job of torchrun",
            "Run it without a launcher: python -m hvdtrain doctor, with --hostfile FILE for several hosts; "
            f"or under horovodrun -np {launch.size}.",
            everywhere=True,
        )
    name = os.environ.get("HOROVOD_HOSTNAME", "") or os.uname().nodename
    host_info = collect_host_info(options, Agent(name, _local_size(), _is_leader()))
    transport = open_transport()
    build = installed_build()
    check_launch_is_seen(launch, transport.size, transport.index, (build and build.mpi) or "")
    stop_waiting = threading.Event()  # set if the launcher ends the job: print what is known so far
    if isinstance(transport, Rank0Transport) and transport.index == 0:
        stop_waiting = transport.stop_waiting
        signal.signal(signal.SIGTERM, lambda *_: stop_waiting.set())
    if transport.size == 1 and host_info["software"]["versions"].get("PyTorch"):
        # several hosts compare versions alone: importing all libraries on each takes long
        host_info["software"]["libraries"] = import_libraries(options.timeout_seconds)
    collect(transport, options, host_info)
    report = _make_report(transport, host_info)
    diagnosis = diagnose(report, transport.title)
    can_start = transport.size > 1 and not diagnosis.exit_code
    framework = _framework_to_start(options, report) if can_start else ""
    framework = transport.allgather("framework", framework, _STEP_SECONDS)[0]  # rank 0 decides
    if framework:
        result = start_horovod(transport, framework, options.speed, stop_waiting.is_set)
        diagnosis = add_horovod_result(diagnosis, result, _host_names(transport))
    if transport.index == 0:
        _print(diagnosis, as_json)
    code = diagnosis.exit_code if transport.index == 0 else 0
    _leave(transport, code)
    return code


def _make_report(transport: Transport, own_info: dict[str, Any]) -> Report:
    """Return the report of a launched job; an agent that did not answer counts as a host of its own."""
    hosts, agents = [], []
    for index, info in enumerate(transport.answers["host info"]):
        if info is None:
            name = f"host of rank {index}"
            remedy = "Look at the output of its worker. Then run: python -m hvdtrain doctor --hostfile FILE."
            found = "its worker did not report in time"
            hosts.append(Host(name, 1, None, Finding(name, "doctor", "fail", found, remedy)))
            agents.append(index)
        elif info["is_leader"]:
            hosts.append(Host(info["name"], info["slots"], info))
            agents.append(index)
    return Report(tuple(hosts), tuple(agents), transport.answers, own_info.get("directory", ""))


def _host_names(transport: Transport) -> list[str]:
    return [info["name"] if info else "" for info in transport.answers["host info"]]


def _framework_to_start(options: CheckOptions, report: Report) -> str:
    """Return the framework to start Horovod with: the first one that loads on all hosts."""
    for name in options.frameworks:
        if all(info["software"]["horovod"].get(name) == "" for _, info in report.responding):
            return name
    return ""


def _print(diagnosis: Diagnosis, as_json: bool) -> None:
    if as_json:
        print(to_json(diagnosis), flush=True)
        return
    console = open_console()
    if not console.is_terminal or console.width > _MAX_WIDTH:
        console = Console(file=console.file, force_terminal=console.is_terminal, width=_MAX_WIDTH)
    show(diagnosis, console)
    console.file.flush()


def _leave(transport: Transport, code: int) -> None:
    """Close the transport. If an agent was lost, end the process instead, since MPI would wait for it."""
    if isinstance(transport, Rank0Transport) and transport.has_lost_agents:
        sys.stdout.flush()
        os._exit(code)
    transport.close()


def _is_leader() -> bool:
    return next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0") == "0"


def _local_size() -> int:
    given = next((os.environ[name] for name in _LOCAL_SIZES if name in os.environ), "")
    return int(given) if given else workers_on_this_host(os.environ) or 1


if __name__ == "__main__":
    print(_PREFIX + json.dumps(_measure(sys.argv[1], sys.argv[2] == "speed")), flush=True)
