"""Checks of the benchmarks: slow hosts and slow links."""

from statistics import median
from typing import Any

from hvdtrain.tools.doctor.report import Finding, Report
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
