"""Checks of names, interfaces, ports and clocks."""

import ipaddress
from collections import Counter
from typing import Any

from hvdtrain.tools.doctor.report import Finding, Report, Status, summarize_names

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
