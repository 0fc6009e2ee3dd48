"""Print a diagnosis, as a table or as a JSON document."""

import json
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import hvdtrain
from hvdtrain.storage.text import counted
from hvdtrain.tools.doctor.checks_network import compute_results, pair_times
from hvdtrain.tools.doctor.report import Diagnosis, Finding, Status, summarize_names, worst_status
from hvdtrain.tools.doctor.speed import MIB, SIZES, bus_bytes_per_second, bytes_per_second

_FORMAT = 1
_INTERNAL = ("name", "slots", "is_leader", "process")
# mark in the table, title in texts, style
_LOOK: dict[Status, tuple[str, str, str]] = {
    "ok": ("ok", "ok", "green"),
    "warn": ("!", "warning", "yellow"),
    "fail": ("X", "FAIL", "bold red"),
}
_MAX_NAMED = 4  # up to this number of hosts, columns have the hosts' names
_MAX_NUMBERED = 16  # up to this number, columns have numbers; with more hosts, statuses are counted
_NAME_WIDTH = 12


def to_json(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as one JSON document on one line."""
    report = diagnosis.report
    facts = [{k: v for k, v in (host.info or {}).items() if k not in _INTERNAL} for host in report.hosts]
    names = ("host", "check", "verdict", "found", "remedy")
    document = {
        "format": _FORMAT,
        "hvdtrain": hvdtrain.__version__,
        "how": diagnosis.transport,
        "exit_code": diagnosis.exit_code,
        "hosts": [
            {"name": host.name, "slots": host.slots, "facts": known or None}
            for host, known in zip(report.hosts, facts, strict=True)
        ],
        "findings": [dict(zip(names, finding, strict=True)) for finding in diagnosis.findings],
        "compute": compute_results(report),
        "messages": [
            {"hosts": list(pair), **_message_speeds(times)} for pair, times in pair_times(report).items()
        ],
        "allreduce": None,
    }
    if seconds := diagnosis.horovod.get("seconds"):
        workers = diagnosis.horovod["workers"]
        rates = {size: bus_bytes_per_second(int(size), workers, one) for size, one in seconds.items()}
        document["allreduce"] = {**diagnosis.horovod, "bus_bytes_per_second": rates}
    return json.dumps(document)


def _message_speeds(times: dict[str, Any]) -> dict[str, Any]:
    if "error" in times:
        return {"error": times["error"]}
    return {
        "by": "TCP",
        "latency_seconds": times[str(SIZES[0])] / 2,
        "bytes_per_second": {size: bytes_per_second(times, int(size)) for size in list(times)[1:]},
    }


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the table of checks, the benchmarks, each problem with its remedy, and the conclusion."""
    names = [host.name for host in diagnosis.report.hosts]
    console.print(_checks_table(diagnosis, names))
    if _MAX_NAMED < len(names) <= _MAX_NUMBERED:
        legend = "  ".join(f"{number} {name}" for number, name in enumerate(names, start=1))
        console.print(Text(f"hosts: {legend}"))
    _show_speed(diagnosis, console)
    # failures first; hosts with the same problem share one text
    problems = sorted(
        (finding for finding in diagnosis.findings if finding.status != "ok"),
        key=lambda finding: (finding.status != "fail", *finding[1:]),
    )
    for (_, status, found, remedy), group in groupby(problems, lambda finding: finding[1:]):
        same = list(group)
        _, title, style = _LOOK[status]
        hosts = summarize_names([finding.host for finding in same])
        text = f"  {hosts}: {same[0].check}: {found}\n      {remedy}"
        console.print(Text.assemble((f"\n{title}", style), text))
    failed = {finding.host for finding in problems if finding.status == "fail"}
    warnings = sum(finding.status == "warn" for finding in problems)
    number, notes = counted(len(names), "host"), f", {counted(warnings, 'warning')}" if warnings else ""
    if failed:
        because = summarize_names([name for name in names if name in failed])
        console.print(Text(f"\n{number}: a job would fail because of {because}{notes}", style="bold red"))
    else:
        console.print(Text(f"\n{number}: ready{notes}", style="bold green"))


def _checks_table(diagnosis: Diagnosis, hosts: list[str]) -> Table:
    """Return the table of checks by hosts. A value that all hosts share is shown once."""
    checks = list(dict.fromkeys(finding.check for finding in diagnosis.findings))
    table = Table(box=None, pad_edge=False, padding=(0, 2 if len(hosts) <= _MAX_NAMED else 1, 0, 0))
    table.add_column("check", no_wrap=True, min_width=max(map(len, checks), default=0))
    if len(hosts) > _MAX_NUMBERED:
        table.add_column("hosts", no_wrap=True, min_width=len("16 ok, 16 warning, 16 FAIL"))
    else:
        for number, name in enumerate(hosts, start=1):
            title = name[:_NAME_WIDTH] if len(hosts) <= _MAX_NAMED else str(number)
            table.add_column(title, no_wrap=True, justify="center", min_width=max(2, len(title)))
    table.add_column("found", overflow="fold")
    for check in checks:
        findings = [finding for finding in diagnosis.findings if finding.check == check]
        good = {finding.found for finding in findings if finding.status == "ok"}
        common = "" if len(good) > 1 else good.pop() if good else "see below"
        table.add_row(check, *_cells(hosts, findings), common)
    return table


def _cells(hosts: list[str], findings: list[Finding]) -> list[Text]:
    of_hosts = [[finding for finding in findings if finding.host == name] for name in hosts]
    statuses = [worst_status(of_host) if of_host else None for of_host in of_hosts]
    if len(hosts) <= _MAX_NUMBERED:
        looks = [_LOOK[status] if status else ("-", "", "dim") for status in statuses]
        return [Text(mark, style=style) for mark, _, style in looks]
    counts = [f"{statuses.count(kind)} {_LOOK[kind][1]}" for kind in _LOOK if kind in statuses]
    return [Text(", ".join(counts), style=_LOOK[worst_status(findings)][2])]


def _show_speed(diagnosis: Diagnosis, console: Console) -> None:
    computed = compute_results(diagnosis.report)
    if computed:
        rates = [f"{name} {one['gflops']:.0f}" for name, one in computed.items() if "gflops" in one]
        console.print(Text(f"\ncompute, GFLOP/s on one thread: {', '.join(rates)}"))
    pairs = pair_times(diagnosis.report)
    if computed and any(len(times) > 1 for times in pairs.values()):
        table = _speed_table("messages between hosts, over TCP", "hosts", "latency")
        for pair, times in pairs.items():
            name = " - ".join(host[:_NAME_WIDTH] for host in pair)
            if "error" in times:
                table.add_row(name, times["error"])
            else:
                speeds = [_rate(bytes_per_second(times, size)) for size in SIZES[1:]]
                table.add_row(name, _time(times[str(SIZES[0])] / 2), *speeds)
        console.print(table)
    seconds = diagnosis.horovod.get("seconds", {})
    if len(seconds) > 1:
        workers, controller = diagnosis.horovod["workers"], diagnosis.horovod["controller"]
        title = f"all-reduce by Horovod over {controller}, bus bandwidth"
        table = _speed_table(title, "workers", "time of 1 KiB")
        speeds = [_rate(bus_bytes_per_second(size, workers, seconds[str(size)])) for size in SIZES[1:]]
        table.add_row(str(workers), _time(seconds[str(SIZES[0])]), *speeds)
        console.print(table)


def _speed_table(title: str, first: str, second: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="", box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    table.add_column(second, justify="right")
    for size in SIZES[1:]:
        name = f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _rate(bytes_per_second: float | None) -> str:
    """Return a bandwidth as a text in MB/s; a MB is 10^6 bytes."""
    return "-" if bytes_per_second is None else f"{bytes_per_second / 1e6:,.0f} MB/s"
