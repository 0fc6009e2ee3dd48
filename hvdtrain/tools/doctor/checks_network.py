"""Checks of names, interfaces, ports and clocks."""

import ipaddress
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hvdtrain.errors import EXIT_DONE, EXIT_ENVIRONMENT
from hvdtrain.tools.doctor.checks_machine import check_machines, check_software
from hvdtrain.tools.doctor.report import Finding, Report, Status, summarize_names, worst_status
from hvdtrain.tools.doctor.speed import MIB, bytes_per_second

_SLOW = 0.4  # of the median
_STARVED = 0.6  # of a core; a process that gets less competes with others, or is limited


def compute_results(report: Report) -> dict[str, dict[str, Any]]:
    """Return the result of the compute benchmark by host; the better one if it ran twice."""
    found: dict[str, dict[str, Any]] = {}
    for index, host in enumerate(report.hosts):
        for step in ("compute", "compute again"):
            result = report.answer(step, index)
            if result and result.get("gflops", 0.0) >= found.get(host.name, {}).get("gflops", 0.0):
                found[host.name] = result
    return found


def check_speed(report: Report) -> list[Finding]:
    """Report hosts whose computation or messages are much slower than the median."""
    return _slow_hosts(report) + _slow_links(report)


def _slow_hosts(report: Report) -> list[Finding]:
    results = compute_results(report)
    rates = {name: result["gflops"] for name, result in results.items() if "gflops" in result}
    findings = [
        Finding(name, "compute", "warn", result["error"], "NumPy may be damaged there: reinstall it.")
        for name, result in results.items()
        if "error" in result
    ]
    middle = median(rates.values()) if rates else 0.0
    for name, rate in rates.items():
        if len(rates) < 2 or rate >= _SLOW * middle:
            findings.append(
                Finding(name, "compute", "ok", "similar on all" if len(rates) > 1 else "measured")
            )
            continue
        share = results[name]["core_share"]
        starved = share < _STARVED
        found = f"{middle / rate:.1f} times slower than the median" + (
            f": it got {share:.0%} of a core" if starved else ""
        )
        remedy = (
            "Another load, or a CPU limit (cgroup, container), takes the rest: see top."
            if starved
            else "Another load may be the cause: see top, then clock rates, temperature and power settings."
        )
        remedy += " All workers wait for the slowest one: fix it, or leave the host out."
        findings.append(Finding(name, "compute", "warn", found, remedy))
    return findings


def pair_times(report: Report) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the message times between hosts, by the names of the two hosts."""
    names = {str(agent): host.name for agent, host in zip(report.agents, report.hosts, strict=True)}
    found = {}
    for step, values in report.answers.items():
        if step.startswith("pair "):
            _, first, second = step.split()
            result = values[int(first)]
            if result:
                found[names[first], names[second]] = result
    return found


def _slow_links(report: Report) -> list[Finding]:
    rates = {
        pair: rate
        for pair, times in pair_times(report).items()
        if "error" not in times and (rate := bytes_per_second(times, MIB))
    }
    if len(rates) < 3:  # of two links, either one may be the exception
        return []
    middle = median(rates.values())
    slow = {pair for pair, rate in rates.items() if rate < _SLOW * middle}
    findings = []
    for host in report.hosts:
        own = [pair for pair in rates if host.name in pair]
        if own and all(pair in slow for pair in own) and len(slow) < len(rates):
            found = (
                f"messages of 1 MiB go {middle / max(rates[p] for p in own):.1f} times slower than the median"
            )
            remedy = "See the speed of its link (ethtool), its errors (ip -s link), and other traffic."
            findings.append(Finding(host.name, "link", "warn", found, remedy))
    return findings


_CLOCK_SECONDS = 1.0
_AHEAD_SECONDS = 25.0  # horovodrun gives workers 30 seconds to start, by the clock of its own host
_BLOCKED = (
    "Let the hosts of the job connect to each other on all TCP ports (ip_local_port_range at least): a "
    "firewall on that host or between them blocks it."
)


def check_network(report: Report) -> list[Finding]:
    """Check names, the common interface, connections between all hosts, and clocks."""
    findings = _own_names(report)
    if len(report.responding) > 1:
        findings += _interfaces(report) + _ports(report) + _clocks(report)
    return findings


def _own_names(report: Report) -> list[Finding]:
    findings = []
    for host, info in report.responding:
        own_name, addresses = info["hostname"], info["addresses"]
        foreign = [
            address
            for address in addresses
            if address not in info["own_addresses"] and not address.startswith("127.")
        ]
        if not addresses:
            found, remedy = f"its own name, {own_name}, does not resolve there", _name_remedy(own_name)
            findings.append(Finding(host.name, "own name", "fail", found, remedy))
        elif foreign:
            found = (
                f"its own name, {own_name}, resolves to {', '.join(foreign)}, which is not an address of it"
            )
            findings.append(Finding(host.name, "own name", "fail", found, _name_remedy(own_name)))
        else:
            findings.append(Finding(host.name, "own name", "ok", "resolves"))
    return findings


def _name_remedy(name: str) -> str:
    return f"Add its address and {name} to its /etc/hosts, or to DNS. Otherwise Gloo crashes."


def common_interfaces(report: Report) -> list[str]:
    """Return the interface names that all hosts have; those that connect all hosts come first."""
    names = [set(info["interfaces"]) for _, info in report.responding]
    common = sorted(set.intersection(*names)) if names else []
    return sorted(common, key=lambda name: not _connects_all(report, name))


def _connects_all(report: Report, name: str) -> bool:
    return not any(error for *_, interface, error in _links(report) if interface == name)


def _links(report: Report) -> list[tuple[int, int, str, str]]:
    """Return all tried connections: index of the source and of the target host, interface, error."""
    links = []
    for source in range(len(report.hosts)):
        for target in range(len(report.hosts)):
            tried = _tried(report, source, target)
            links += [(source, target, name, link["error"]) for name, link in tried.items()]
    return links


def _tried(report: Report, source: int, target: int) -> dict[str, dict[str, Any]]:
    """Return the connections from one host to another, by interface."""
    links: dict[str, Any] = report.answer("links", source) or {}
    tried: dict[str, dict[str, Any]] = links.get(str(report.agents[target]), {})
    return tried


def _interfaces(report: Report) -> list[Finding]:
    """Check that one interface name exists on all hosts: Horovod and Open MPI take interfaces by name."""
    common = common_interfaces(report)
    return _common_interface(report, common[0]) if common else _no_common_interface(report)


def _common_interface(report: Report, chosen: str) -> list[Finding]:
    others = {name for _, info in report.responding for name in info["interfaces"]} - {chosen}
    hint = f" (--network-interfaces {chosen})" if others else ""
    networks = [
        ", ".join(sorted({str(ipaddress.IPv4Interface(text).network) for text in info["interfaces"][chosen]}))
        for _, info in report.responding
    ]
    # hosts in several networks are connected by routers, which the check of the ports tests
    network = f" {networks[0]}" if len(set(networks)) == 1 else ""
    found = f"{chosen}{hint}{network}"
    return [Finding(host.name, "interface", "ok", found) for host, _ in report.responding]


def _no_common_interface(report: Report) -> list[Finding]:
    check = "interface"
    counts = Counter(name for _, info in report.responding for name in info["interfaces"])
    expected = max(counts, key=counts.__getitem__, default="")  # of equal counts, that of the first host
    owners = [host.name for host, info in report.responding if expected in info["interfaces"]]
    who_has = "the others have" if len(owners) > 1 else f"{owners[0]} has" if owners else ""
    findings = []
    for host, info in report.responding:
        names = ", ".join(info["interfaces"])
        if expected in info["interfaces"]:
            findings.append(Finding(host.name, check, "ok", expected))
        elif not names:
            found = "it has no interface that leads to other hosts"
            remedy = "Bring its network interface up, with an address."
            findings.append(Finding(host.name, check, "fail", found, remedy))
        else:
            found = f"it has {names}, but not {expected}, which {who_has}"
            remedy = (
                f"Give the interface that leads to the other hosts the same name on all of them "
                f"(ip link set dev {next(iter(info['interfaces']))} name {expected}, or an altname of udev)."
            )
            findings.append(Finding(host.name, check, "fail", found, remedy))
    return findings


def _ports(report: Report) -> list[Finding]:
    """Check that every host reaches every other on unprivileged ports, by at least one interface."""
    check = "ports"
    errors: dict[tuple[int, int], str] = {}  # of the best interface, by source and target
    for source, target, _, error in _links(report):
        known = errors.get((source, target), error)
        errors[source, target] = error if known else known
    responding = [index for index, host in enumerate(report.hosts) if host.info is not None]
    findings = []
    for index in responding:
        name = report.hosts[index].name
        incoming = {a: errors.get((a, index), "no address to try") for a in responding if a != index}
        outgoing = {b: errors.get((index, b), "no address to try") for b in responding if b != index}
        failed_in = [a for a, error in incoming.items() if error]
        failed_out = [b for b, error in outgoing.items() if error]
        # Of the two ends of a broken link, name the host with more of them; of two hosts, the target.
        if failed_in and len(failed_in) >= max(1, _most_failed_incoming(errors, responding, index)):
            reasons = ", ".join(sorted({incoming[a] for a in failed_in}))
            sources = summarize_names([report.hosts[a].name for a in failed_in])
            found = f"connections to its unprivileged ports fail ({reasons}) from {sources}"
            findings.append(Finding(name, check, "fail", found, _BLOCKED))
        elif len(failed_out) == len(responding) - 1 and len(responding) > 2:
            reasons = ", ".join(sorted({outgoing[b] for b in failed_out}))
            found = f"it cannot connect to unprivileged ports of any other host ({reasons})"
            findings.append(Finding(name, check, "fail", found, _BLOCKED))
        else:
            findings.append(Finding(name, check, "ok", "reachable"))
    return findings


def _most_failed_incoming(errors: dict[tuple[int, int], str], responding: list[int], index: int) -> int:
    """Return the largest number of failed incoming connections among the other hosts."""
    return max(
        (sum(1 for a in responding if a != b and errors.get((a, b))) for b in responding if b != index),
        default=0,
    )


def _clocks(report: Report) -> list[Finding]:
    """Compare the clocks with that of the first host, by the fastest round trip."""
    findings = []
    first = next(index for index, host in enumerate(report.hosts) if host.info is not None)
    for index, host in enumerate(report.hosts):
        offset = _offset(report, first, index)
        if host.info is None or offset is None:
            continue
        seconds, uncertainty = offset
        if abs(seconds) - uncertainty > _CLOCK_SECONDS:
            direction = "ahead of" if seconds > 0 else "behind"
            found = f"{abs(seconds):,.1f} s {direction} {report.hosts[first].name}"
            remedy = "Set its clock by NTP (timedatectl set-ntp true): times in files and logs are wrong."
            status: Status = "fail" if seconds - uncertainty > _AHEAD_SECONDS else "warn"
            if status == "fail":
                found += ": horovodrun's --start-timeout expires there at once"
            findings.append(Finding(host.name, "clock", status, found, remedy))
        else:
            findings.append(Finding(host.name, "clock", "ok", f"within {_CLOCK_SECONDS:.0f} s"))
    return findings


def _offset(report: Report, first: int, index: int) -> tuple[float, float] | None:
    """Return how many seconds a host's clock is ahead of the first host's, and the uncertainty."""
    if index == first:
        return 0.0, 0.0
    offsets: list[tuple[float, float]] = []
    for source, target, sign in ((first, index, 1), (index, first, -1)):
        links = _tried(report, source, target).values()
        offsets += [(sign * link["clock"], link["trip"]) for link in links if not link["error"]]
    return min(offsets, key=lambda one: one[1], default=None)


_CHECKS = (check_software, check_network, check_machines, check_speed)


@dataclass(frozen=True)
class Diagnosis:
    """A report with the findings of all checks.

    Attributes:
        report: what the hosts reported.
        transport: title of the transport that carried the hosts' answers.
        findings: of all checks, in the order of the checks.
        horovod: the result of :func:`~hvdtrain.tools.doctor.command.start_horovod`; empty if Horovod was
            not started.
    """

    report: Report
    transport: str
    findings: tuple[Finding, ...]
    horovod: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """3 if a job would fail, else 0."""
        return EXIT_ENVIRONMENT if worst_status(self.findings) == "fail" else EXIT_DONE


def diagnose(report: Report, transport: str) -> Diagnosis:
    """Run all checks on a report.

    Args:
        report: what the hosts reported.
        transport: title of the transport that carried the hosts' answers.
    """
    findings = [host.problem for host in report.hosts if host.problem]
    if report.responding:
        for check in _CHECKS:
            findings += check(report)
    return Diagnosis(report, transport, tuple(findings))


def add_horovod_result(diagnosis: Diagnosis, result: Mapping[str, Any], host_of: list[str]) -> Diagnosis:
    """Return the diagnosis with a finding per host on the start of Horovod.

    Args:
        diagnosis: the findings so far.
        result: what ``start_horovod`` returned.
        host_of: for each rank, the name of its host.
    """
    check = "Horovod starts"
    errors: dict[str, str] = {}
    for rank, error in enumerate(result.get("errors", [])):
        if error:
            errors.setdefault(host_of[rank], f"rank {rank}: {error}")
    remedy = "Start the doctor again with HOROVOD_LOG_LEVEL=debug to see what Horovod waits for."
    findings = [
        Finding(host.name, check, "fail", errors[host.name], remedy)
        if host.name in errors
        else Finding(host.name, check, "ok", "" if errors else f"over {result['controller']}")
        for host in diagnosis.report.hosts
    ]
    return Diagnosis(diagnosis.report, diagnosis.transport, (*diagnosis.findings, *findings), result)
