"""Checks of what was measured: slow hosts and slow links."""

from statistics import median
from typing import Any

from hvdtrain.doctor.case import Case
from hvdtrain.doctor.findings import Finding
from hvdtrain.doctor.speed import MIB, bytes_per_second

_SLOW = 0.4  # of the median
_SHARE = 0.6  # of a core; below, something else takes it


def computing(case: Case) -> dict[str, dict[str, Any]]:
    """Give the compute benchmark by host: the better of two, where it was done twice."""
    found: dict[str, dict[str, Any]] = {}
    for place, host in enumerate(case.hosts):
        for step in ("compute", "compute again"):
            result = case.said(step, place)
            if result and result.get("gflops", 0.0) >= found.get(host.name, {}).get("gflops", 0.0):
                found[host.name] = result
    return found


def check_speed(case: Case) -> list[Finding]:
    """Name hosts that compute, and pairs of hosts that send, much more slowly than the median."""
    return _slow_hosts(case) + _slow_links(case)


def _slow_hosts(case: Case) -> list[Finding]:
    results = computing(case)
    rates = {name: result["gflops"] for name, result in results.items() if "gflops" in result}
    findings = [
        Finding(name, "compute", "warn", result["error"], "Is NumPy whole there?")
        for name, result in results.items()
        if "error" in result
    ]
    middle = median(rates.values()) if rates else 0.0
    for name, rate in rates.items():
        if len(rates) < 2 or rate >= _SLOW * middle:
            findings.append(Finding(name, "compute", "ok", "all alike" if len(rates) > 1 else "measured"))
            continue
        share = results[name]["core_share"]
        starved = share < _SHARE
        found = f"{middle / rate:.1f} times slower than the median" + (
            f": it got {share:.0%} of a core" if starved else ""
        )
        remedy = (
            "Another load, or a limit of CPU time (cgroup, container) is there: see top."
            if starved
            else "Another load may be the cause: see top; then clocks, heat, power settings."
        )
        remedy += " All workers wait for the slowest: leave it out, or mend it."
        findings.append(Finding(name, "compute", "warn", found, remedy))
    return findings


def pair_times(case: Case) -> dict[tuple[str, str], dict[str, Any]]:
    """Give what was measured between hosts, by their names."""
    places = {str(member): host.name for member, host in zip(case.members, case.hosts, strict=True)}
    found = {}
    for step, values in case.record.items():
        if step.startswith("pair "):
            _, first, second = step.split()
            result = values[int(first)]
            if result:
                found[places[first], places[second]] = result
    return found


def _slow_links(case: Case) -> list[Finding]:
    rates = {
        pair: rate
        for pair, times in pair_times(case).items()
        if "error" not in times and (rate := bytes_per_second(times, MIB))
    }
    if len(rates) < 3:  # of two, nobody can tell which is the odd one
        return []
    middle = median(rates.values())
    slow = {pair for pair, rate in rates.items() if rate < _SLOW * middle}
    findings = []
    for host in case.hosts:
        own = [pair for pair in rates if host.name in pair]
        if own and all(pair in slow for pair in own) and len(slow) < len(rates):
            found = (
                f"messages of 1 MiB go {middle / max(rates[p] for p in own):.1f} times slower than the median"
            )
            remedy = "See the speed of its link (ethtool), errors (ip -s link), and other traffic."
            findings.append(Finding(host.name, "link", "warn", found, remedy))
    return findings
