"""Checks of names, interfaces, ports and clocks, and all checks together."""

import ipaddress
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hvdtrain.tools.doctor.checks import check_machines, check_software
from hvdtrain.tools.doctor.report import Diagnosis, Finding, Host, HostInfo, Report, Verdict, summarize_names

_CLOCK_SECONDS = 1.0
_AHEAD_SECONDS = 25.0  # horovodrun gives workers 30 seconds to start, by the clock of its own host
_NO_ADDRESS = "no address to try"
_BLOCKED = (
    "Let the hosts of the job connect to each other on all TCP ports (ip_local_port_range at least): a "
    "firewall on that host or between them blocks it."
)


def diagnose(report: Report, transport: str) -> Diagnosis:
    """Run all checks on a report that a transport of this title carried."""
    findings = [host.problem for host in report.hosts if host.problem]
    if report.responding:
        findings += check_software(report) + report.each("own name", _own_name)
        if len(report.responding) > 1:
            findings += _interfaces(report) + _ports(report) + _clocks(report)
        findings += check_machines(report)
    return Diagnosis(report, transport, tuple(findings))


def add_horovod_result(diagnosis: Diagnosis, result: Mapping[str, Any], host_of: list[str]) -> Diagnosis:
    """Return the diagnosis with what ``start_horovod`` returned; ``host_of`` has the host of each rank."""
    errors: dict[str, str] = {}
    for rank, error in enumerate(result.get("errors", [])):
        if error:
            errors.setdefault(host_of[rank], f"rank {rank}: {error}")
    remedy = "Start the doctor again with HOROVOD_LOG_LEVEL=debug to see what Horovod waits for."
    good = ("ok", "" if errors else f"over {result['controller']}", "")
    findings = [
        Finding(name, "Horovod starts", *(("fail", errors[name], remedy) if name in errors else good))
        for name in (host.name for host in diagnosis.report.hosts)
    ]
    return replace(diagnosis, findings=(*diagnosis.findings, *findings), horovod=result)


def _own_name(_: Host, info: HostInfo) -> Verdict:
    name, addresses = info["hostname"], info["addresses"]
    known = {one for one in addresses if one in info["own_addresses"] or one.startswith("127.")}
    foreign = ", ".join(one for one in addresses if one not in known)
    remedy = f"Add its address and {name} to its /etc/hosts, or to DNS. Otherwise Gloo crashes."
    if not addresses:
        return "fail", f"its own name, {name}, does not resolve there", remedy
    if foreign:
        found = f"its own name, {name}, resolves to {foreign}, which is not an address of it"
        return "fail", found, remedy
    return "ok", "resolves", ""


def _links(report: Report) -> list[tuple[int, int, str, dict[str, Any]]]:
    """Return all tried connections: index of the source and of the target host, interface, result."""
    return [
        (source, target, name, link)
        for source in range(len(report.hosts))
        for target, agent in enumerate(report.agents)
        for name, link in ((report.answer("links", source) or {}).get(str(agent)) or {}).items()
    ]


def _interfaces(report: Report) -> list[Finding]:
    """Check that one interface name exists on all hosts: Horovod and Open MPI take interfaces by name."""
    counts = Counter(name for _, info in report.responding for name in info["interfaces"])
    common = sorted(name for name, number in counts.items() if number == len(report.responding))
    if common:
        broken = {name for *_, name, link in _links(report) if link["error"]}
        chosen = min(common, key=lambda name: name in broken)  # one that connects all hosts, if there is any
        hint = f" (--network-interfaces {chosen})" if len(counts) > 1 else ""
        texts_of = [info["interfaces"][chosen] for _, info in report.responding]
        networks = {
            ", ".join(sorted({str(ipaddress.IPv4Interface(text).network) for text in texts}))
            for texts in texts_of
        }
        # hosts in several networks are connected by routers, which the check of the ports tests
        network = f" {networks.pop()}" if len(networks) == 1 else ""
        return report.each("interface", lambda *_: ("ok", f"{chosen}{hint}{network}", ""))
    expected = max(counts, key=counts.__getitem__, default="")  # of equal counts, that of the first host
    owners = [host.name for host, info in report.responding if expected in info["interfaces"]]
    who_has = "the others have" if len(owners) > 1 else f"{owners[0]} has" if owners else ""

    def judge(_: Host, info: HostInfo) -> Verdict:
        names = list(info["interfaces"])
        if expected in names:
            return "ok", expected, ""
        if not names:
            remedy = "Bring its network interface up, with an address."
            return "fail", "it has no interface that leads to other hosts", remedy
        remedy = (
            "Give the interface that leads to the other hosts the same name on all of them "
            f"(ip link set dev {names[0]} name {expected}, or an altname of udev)."
        )
        return "fail", f"it has {', '.join(names)}, but not {expected}, which {who_has}", remedy

    return report.each("interface", judge)


def _ports(report: Report) -> list[Finding]:
    """Check that every host reaches every other on unprivileged ports, by at least one interface."""
    tried: dict[tuple[int, int], str] = {}  # the error of the best interface, by source and target
    for source, target, _, link in _links(report):
        tried[source, target] = link["error"] if tried.get((source, target), "x") else ""
    responding = [index for index, host in enumerate(report.hosts) if host.info is not None]
    pairs = [(a, b) for a in responding for b in responding if a != b]
    errors = {pair: error for pair in pairs if (error := tried.get(pair, _NO_ADDRESS))}
    failed_in = Counter(b for (_, b), error in errors.items() if error != _NO_ADDRESS)
    findings = []
    for index in responding:
        name = report.hosts[index].name
        incoming = {a: error for (a, b), error in errors.items() if b == index}
        outgoing = [error for (a, _), error in errors.items() if a == index]
        most_of_others = max((failed_in[other] for other in responding if other != index), default=0)
        # Of the two ends of a broken link, name the host with more of them; of two hosts, the target.
        if incoming and len(incoming) >= max(1, most_of_others):
            sources = summarize_names([report.hosts[a].name for a in incoming])
            reasons = ", ".join(sorted(set(incoming.values())))
            found = f"connections to its unprivileged ports fail ({reasons}) from {sources}"
        elif len(outgoing) == len(responding) - 1 and len(responding) > 2:
            reasons = ", ".join(sorted(set(outgoing)))
            found = f"it cannot connect to unprivileged ports of any other host ({reasons})"
        else:
            findings.append(Finding(name, "ports", "ok", "reachable"))
            continue
        findings.append(Finding(name, "ports", "fail", found, _BLOCKED))
    return findings


def _clocks(report: Report) -> list[Finding]:
    """Compare the clocks with that of the first host, by the fastest round trip."""
    first = next(index for index, host in enumerate(report.hosts) if host.info is not None)
    offsets: dict[int, tuple[float, float]] = {first: (0.0, 0.0)}  # round trip, seconds ahead
    for source, target, _, link in _links(report):
        if first in (source, target) and not link["error"]:
            other, sign = (target, 1) if source == first else (source, -1)
            offset = (link["trip"], sign * link["clock"])
            offsets[other] = min(offsets.get(other, offset), offset)
    findings = []
    for index, (uncertainty, seconds) in sorted(offsets.items()):
        name = report.hosts[index].name
        if abs(seconds) - uncertainty <= _CLOCK_SECONDS:
            findings.append(Finding(name, "clock", "ok", f"within {_CLOCK_SECONDS:.0f} s"))
            continue
        found = f"{abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'} {report.hosts[first].name}"
        remedy = "Set its clock by NTP (timedatectl set-ntp true): times in files and logs are wrong."
        is_ahead = seconds - uncertainty > _AHEAD_SECONDS
        found += ": horovodrun's --start-timeout expires there at once" if is_ahead else ""
        findings.append(Finding(name, "clock", "fail" if is_ahead else "warn", found, remedy))
    return findings
