"""The command, in its three ways: alone, from the head over ssh, under a launcher."""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from hvdtrain.doctor.agents import Head, run_agent
from hvdtrain.doctor.case import Case
from hvdtrain.doctor.document import as_json
from hvdtrain.doctor.examination import Member, Request, examine, gather
from hvdtrain.doctor.exchange import Exchange
from hvdtrain.doctor.findings import Finding, Host
from hvdtrain.doctor.horovod_start import start_horovod
from hvdtrain.doctor.launched import ThroughRank0, open_exchange
from hvdtrain.doctor.ssh import SshOptions
from hvdtrain.doctor.table import show
from hvdtrain.doctor.verdicts import Diagnosis, diagnose, with_horovod
from hvdtrain.errors import EXIT_DONE, UsageError
from hvdtrain.hosts import HostSlots, parse_host_list, read_host_file
from hvdtrain.terminal import launched_rank, open_console, workers_here

_WIDTH = 100
_STEP_SECONDS = 20.0
_LOCAL_RANKS = (
    "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMIX_LOCAL_RANK", "SLURM_LOCALID",
)  # fmt: skip
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def run_doctor(options: Mapping[str, Any]) -> int:
    """Do what the command line asks for; give the exit code.

    Args:
        options: those of the command, by name.

    Raises:
        UsageError: where options contradict each other, or a host file is wrong.
    """
    if options["agent"]:
        run_agent()
        return EXIT_DONE
    hostfile, hosts = options["hostfile"], options["hosts"]
    if hostfile and hosts:
        raise UsageError("--hostfile and -H both name hosts", "Give one of them.")
    framework = options["framework"]
    request = Request(
        frameworks=(framework,) if framework else ("torch", "tf"),
        run_dir=options["run_dir"],
        speed=not options["quick"],
        seconds=options["timeout"],
    )
    if not hostfile and not hosts:
        return examine_here(request, options["as_json"])
    named = read_host_file(hostfile) if hostfile else parse_host_list(hosts)
    ssh = SshOptions(options["ssh_port"], options["ssh_identity_file"])
    return examine_hosts(named, request, ssh, options["as_json"])


def examine_hosts(hosts: list[HostSlots], request: Request, options: SshOptions, for_machines: bool) -> int:
    """Examine hosts over ssh, before any launch; give the exit code.

    Raises:
        UsageError: under a launcher.
    """
    if launched_rank() is not None:
        raise UsageError(
            "--hostfile and -H are for the time before a launch; this is a launcher's worker",
            "Start without the launcher, or leave them out.",
        )
    head = Head(hosts, request, options)
    head.run()
    facts = head.record.get("facts") or [None] * len(hosts)
    found = tuple(
        Host(host.name, host.slots, facts[index], head.problems.get(index))
        for index, host in enumerate(hosts)
    )
    case = Case(found, tuple(range(len(hosts))), head.record, os.getcwd())
    diagnosis = diagnose(case, "ssh")
    _show(diagnosis, for_machines)
    return diagnosis.exit_code


def examine_here(request: Request, for_machines: bool) -> int:
    """Collective under a launcher. Examine this host, or all hosts of the job; give the exit code."""
    member = Member(os.environ.get("HOROVOD_HOSTNAME", "") or os.uname().nodename, _local_size(), _leads())
    facts = gather(request, member)
    exchange = open_exchange()
    hurry = threading.Event()  # the launcher ends the job: show what is known
    if isinstance(exchange, ThroughRank0) and exchange.index == 0:
        hurry = exchange.hurry
        signal.signal(signal.SIGTERM, lambda *_: hurry.set())
    examine(exchange, request, facts)
    case = _case_of(exchange, facts)
    diagnosis = diagnose(case, exchange.how)
    sound = exchange.size > 1 and not diagnosis.exit_code
    framework = _framework_to_start(request, case) if sound else ""
    framework = exchange.share("framework", framework, _STEP_SECONDS)[0]  # rank 0 knows best
    if framework:
        outcome = start_horovod(exchange, framework, request.speed, hurry.is_set)
        diagnosis = with_horovod(diagnosis, outcome, _host_of(exchange))
    if exchange.index == 0:
        _show(diagnosis, for_machines)
    code = diagnosis.exit_code if exchange.index == 0 else 0
    _leave(exchange, code)
    return code


def _case_of(exchange: Exchange, own_facts: dict[str, Any]) -> Case:
    """Put the hosts of a launched job together; members that said nothing are hosts, too."""
    hosts, members = [], []
    for index, facts in enumerate(exchange.record["facts"]):
        if facts is None:
            name = f"host of rank {index}"
            remedy = "See what its worker printed. Then: python -m hvdtrain doctor --hostfile FILE."
            found = "its worker did not report in time"
            hosts.append(Host(name, 1, None, Finding(name, "doctor", "fail", found, remedy)))
            members.append(index)
        elif facts["leads"]:
            hosts.append(Host(facts["name"], facts["slots"], facts))
            members.append(index)
    return Case(tuple(hosts), tuple(members), exchange.record, own_facts.get("directory", ""))


def _host_of(exchange: Exchange) -> list[str]:
    return [facts["name"] if facts else "" for facts in exchange.record["facts"]]


def _framework_to_start(request: Request, case: Case) -> str:
    """Give the framework that Horovod is started with: the first that loads on all hosts."""
    for name in request.frameworks:
        if all(facts["software"]["horovod"].get(name) == "" for _, facts in case.heard):
            return name
    return ""


def _show(diagnosis: Diagnosis, for_machines: bool) -> None:
    if for_machines:
        print(as_json(diagnosis), flush=True)
        return
    console = open_console()
    if not console.is_terminal or console.width > _WIDTH:
        console = Console(file=console.file, force_terminal=console.is_terminal, width=_WIDTH)
    show(diagnosis, console)
    console.file.flush()


def _leave(exchange: Exchange, code: int) -> None:
    """Under a launcher, end at once where a member is lost: MPI would wait for it."""
    if isinstance(exchange, ThroughRank0) and exchange.has_lost:
        sys.stdout.flush()
        os._exit(code)
    exchange.close()


def _leads() -> bool:
    return next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0") == "0"


def _local_size() -> int:
    given = next((os.environ[name] for name in _LOCAL_SIZES if name in os.environ), "")
    return int(given) if given else workers_here(os.environ) or 1
