"""Checks of names, interfaces, ports and clocks."""

import ipaddress
from collections import Counter
from typing import Any

from hvdtrain.doctor.case import Case, in_short
from hvdtrain.doctor.findings import Finding, Verdict

_CLOCK_SECONDS = 1.0
_AHEAD_SECONDS = 25.0  # horovodrun gives workers 30 seconds to start, by the wall clock of its own host
_BLOCKED = (
    "Let the hosts of the job reach each other on all TCP ports (ip_local_port_range at least): a "
    "firewall on that host or between them stops it."
)


def check_network(case: Case) -> list[Finding]:
    """Check names, the common interface, links between all hosts, and clocks."""
    findings = _own_names(case)
    if len(case.heard) > 1:
        findings += _interfaces(case) + _ports(case) + _clocks(case)
    return findings


def _own_names(case: Case) -> list[Finding]:
    findings = []
    for host, facts in case.heard:
        own, addresses = facts["hostname"], facts["addresses"]
        strange = [
            address
            for address in addresses
            if address not in facts["own_addresses"] and not address.startswith("127.")
        ]
        if not addresses:
            found, remedy = f"its own name, {own}, does not resolve there", _remedy(own)
            findings.append(Finding(host.name, "own name", "fail", found, remedy))
        elif strange:
            found = f"its own name, {own}, resolves to {', '.join(strange)}, which is not its address"
            findings.append(Finding(host.name, "own name", "fail", found, _remedy(own)))
        else:
            findings.append(Finding(host.name, "own name", "ok", "resolves"))
    return findings


def _remedy(name: str) -> str:
    return f"Add a line with its address and {name} to its /etc/hosts, or to DNS. Gloo crashes otherwise."


def common_interfaces(case: Case) -> list[str]:
    """Give the names of interfaces that all hosts have, those that connect all of them first."""
    names = [set(facts["interfaces"]) for _, facts in case.heard]
    common = sorted(set.intersection(*names)) if names else []
    return sorted(common, key=lambda name: not _connects_all(case, name))


def _connects_all(case: Case, name: str) -> bool:
    return not any(error for *_, its_name, error in _links(case) if its_name == name)


def _links(case: Case) -> list[tuple[int, int, str, str]]:
    """Give all links that were tried: from and to (places among the hosts), interface, error."""
    found = []
    for here in range(len(case.hosts)):
        for there in range(len(case.hosts)):
            tried = (case.said("links", here) or {}).get(str(case.members[there]), {})
            found += [(here, there, name, link["error"]) for name, link in tried.items()]
    return found


def _interfaces(case: Case) -> list[Finding]:
    """Horovod and Open MPI are told interfaces by name: one name must do for all hosts."""
    check = "interface"
    common = common_interfaces(case)
    if common:
        chosen = common[0]
        others = {name for _, facts in case.heard for name in facts["interfaces"]} - {chosen}
        hint = f" (--network-interfaces {chosen})" if others else ""
        findings = []
        for host, facts in case.heard:
            networks = {str(ipaddress.IPv4Interface(text).network) for text in facts["interfaces"][chosen]}
            findings.append(Finding(host.name, check, "ok", f"{chosen}{hint} {', '.join(sorted(networks))}"))
        return _networks_once(findings, f"{chosen}{hint}")
    counts = Counter(name for _, facts in case.heard for name in facts["interfaces"])
    rule = max(counts, key=counts.__getitem__, default="")
    findings = []
    for host, facts in case.heard:
        having = ", ".join(facts["interfaces"]) or "no interface that leads to other hosts"
        if counts[rule] > 1 and rule in facts["interfaces"]:
            findings.append(Finding(host.name, check, "ok", rule))
        elif not facts["interfaces"]:
            found, remedy = f"it has {having}", "Bring its network interface up, with an address."
            findings.append(Finding(host.name, check, "fail", found, remedy))
        else:
            found = f"it has {having}" + (f", but not {rule}, which the others have" if rule else "")
            remedy = (
                f"Give the interface that leads to the other hosts the same name everywhere "
                f"(ip link set dev {next(iter(facts['interfaces']))} name {rule}, or an altname of udev)."
            )
            findings.append(Finding(host.name, check, "fail", found, remedy))
    return findings


def _networks_once(findings: list[Finding], without: str) -> list[Finding]:
    """Leave subnets out where hosts are in several: routers connect them, as the ports' check shows."""
    if len({finding.found for finding in findings}) == 1:
        return findings
    return [Finding(f.host, f.check, f.verdict, without) for f in findings]


def _ports(case: Case) -> list[Finding]:
    """Between all hosts, at least one interface must let connections to unprivileged ports through."""
    check = "ports"
    best: dict[tuple[int, int], str] = {}
    for here, there, _, error in _links(case):
        known = best.get((here, there), error)
        best[here, there] = error if known else known
    heard = [place for place, host in enumerate(case.hosts) if host.facts is not None]
    findings = []
    for place in heard:
        name = case.hosts[place].name
        from_others = {a: best.get((a, place), "no address to try") for a in heard if a != place}
        to_others = {b: best.get((place, b), "no address to try") for b in heard if b != place}
        deaf = [a for a, error in from_others.items() if error]
        mute = [b for b, error in to_others.items() if error]
        # of a broken link, the host is named that has more of them; of two hosts, the one connected to
        if deaf and len(deaf) >= max(1, _broken_most(best, heard, place)):
            reasons = ", ".join(sorted({from_others[a] for a in deaf}))
            whom = in_short([case.hosts[a].name for a in deaf])
            found = f"connections to its unprivileged ports fail ({reasons}) from {whom}"
            findings.append(Finding(name, check, "fail", found, _BLOCKED))
        elif len(mute) == len(heard) - 1 and len(heard) > 2:
            reasons = ", ".join(sorted({to_others[b] for b in mute}))
            found = f"it cannot connect to unprivileged ports of any other host ({reasons})"
            findings.append(Finding(name, check, "fail", found, _BLOCKED))
        else:
            findings.append(Finding(name, check, "ok", "reachable"))
    return findings


def _broken_most(best: dict[tuple[int, int], str], heard: list[int], place: int) -> int:
    """Give the most incoming links that any other host misses."""
    return max((sum(1 for a in heard if a != b and best.get((a, b))) for b in heard if b != place), default=0)


def _clocks(case: Case) -> list[Finding]:
    """Clocks against that of the first host, by the fastest round trip."""
    findings = []
    first = next(place for place, host in enumerate(case.hosts) if host.facts is not None)
    for place, host in enumerate(case.hosts):
        offset = _offset(case, first, place)
        if host.facts is None or offset is None:
            continue
        seconds, uncertain = offset
        if abs(seconds) - uncertain > _CLOCK_SECONDS:
            said = f"{abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'} {case.hosts[first].name}"
            remedy = "Set its clock by NTP (timedatectl set-ntp true): times of files and logs mislead."
            verdict: Verdict = "fail" if seconds - uncertain > _AHEAD_SECONDS else "warn"
            if verdict == "fail":
                said += ": horovodrun's --start-timeout is over there before it begins"
            findings.append(Finding(host.name, "clock", verdict, said, remedy))
        else:
            findings.append(Finding(host.name, "clock", "ok", f"within {_CLOCK_SECONDS:.0f} s"))
    return findings


def _offset(case: Case, first: int, place: int) -> tuple[float, float] | None:
    """Give by how many seconds a host's clock is ahead of the first host's, and the uncertainty."""
    if place == first:
        return 0.0, 0.0
    tries: list[tuple[float, float]] = []
    for here, there, sign in ((first, place, 1), (place, first, -1)):
        links: dict[str, Any] = (case.said("links", here) or {}).get(str(case.members[there]), {})
        tries += [(sign * link["clock"], link["trip"]) for link in links.values() if not link["error"]]
    return min(tries, key=lambda one: one[1], default=None)
