"""Print a diagnosis as a table."""

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import hvdtrain
from hvdtrain.storage.text import counted
from hvdtrain.tools.doctor.checks_network import Diagnosis, compute_results, pair_times
from hvdtrain.tools.doctor.report import Finding, Report, Status, summarize_names, worst_status
from hvdtrain.tools.doctor.speed import (
    KIB,
    MIB,
    SIZES,
    bus_bytes_per_second,
    bytes_per_second,
    latency_seconds,
)

_FORMAT = 1
_INTERNAL = ("name", "slots", "is_leader", "process")


def to_json(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as one JSON document on one line."""
    report = diagnosis.report
    hosts = [
        {
            "name": host.name,
            "slots": host.slots,
            "facts": {name: value for name, value in (host.info or {}).items() if name not in _INTERNAL}
            or None,
        }
        for host in report.hosts
    ]
    return json.dumps(
        {
            "format": _FORMAT,
            "hvdtrain": hvdtrain.__version__,
            "how": diagnosis.transport,
            "exit_code": diagnosis.exit_code,
            "hosts": hosts,
            "findings": [_finding(finding) for finding in diagnosis.findings],
            "compute": compute_results(report),
            "messages": [
                {"hosts": list(pair), **_message_speeds(times)} for pair, times in pair_times(report).items()
            ],
            "allreduce": _allreduce_json(diagnosis),
        }
    )


def _finding(finding: Finding) -> dict[str, str]:
    return {
        "host": finding.host,
        "check": finding.check,
        "verdict": finding.status,
        "found": finding.found,
        "remedy": finding.remedy,
    }


def _message_speeds(times: dict[str, Any]) -> dict[str, Any]:
    if "error" in times:
        return {"error": times["error"]}
    by_size = {size: bytes_per_second(times, int(size)) for size in times if size.isdecimal()}
    return {
        "by": times.get("used", "TCP"),
        "latency_seconds": latency_seconds(times),
        "bytes_per_second": dict(list(by_size.items())[1:]),
    }


def _allreduce_json(diagnosis: Diagnosis) -> dict[str, Any] | None:
    horovod = diagnosis.horovod
    if "seconds" not in horovod:
        return None
    workers = horovod["workers"]
    return {
        "workers": workers,
        "controller": horovod["controller"],
        "seconds": horovod["seconds"],
        "bus_bytes_per_second": {
            size: bus_bytes_per_second(int(size), workers, seconds)
            for size, seconds in horovod["seconds"].items()
        },
    }


_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warn": ("!", "yellow"),
    "fail": ("X", "bold red"),
}
_TITLES: dict[Status, str] = {"ok": "ok", "warn": "warning", "fail": "FAIL"}
_MAX_NAMED = 4  # up to this number of hosts, columns have the hosts' names
_MAX_NUMBERED = 16  # up to this number, columns have numbers; with more hosts, statuses are counted
_NAME_WIDTH = 12


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the table of checks, the benchmarks, each problem with its remedy, and the conclusion."""
    hosts = diagnosis.report.hosts
    numbered = _MAX_NAMED < len(hosts) <= _MAX_NUMBERED
    console.print(_checks_table(diagnosis))
    if numbered:
        legend = "  ".join(f"{number} {host.name}" for number, host in enumerate(hosts, start=1))
        console.print(Text(f"hosts: {legend}"))
    _show_speed(diagnosis, console)
    for lines in _problems(diagnosis.findings):
        console.print(lines)
    console.print(_conclusion(diagnosis))


def _checks_table(diagnosis: Diagnosis) -> Table:
    """Return the table of checks by hosts. A value that all hosts share is shown once."""
    hosts = [host.name for host in diagnosis.report.hosts]
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
        of_check = [finding for finding in diagnosis.findings if finding.check == check]
        table.add_row(check, *_cells(hosts, of_check), _common_value(of_check))
    return table


def _cells(hosts: list[str], findings: list[Finding]) -> list[Text]:
    by_host = {name: [f for f in findings if f.host == name] for name in hosts}
    if len(hosts) <= _MAX_NUMBERED:
        return [_mark(of_host) for of_host in by_host.values()]
    statuses = [worst_status(of_host) for of_host in by_host.values() if of_host]
    counts = [
        f"{statuses.count(kind)} {_TITLES[kind]}" for kind in ("ok", "warn", "fail") if kind in statuses
    ]
    return [Text(", ".join(counts), style=_MARKS[worst_status(findings)][1])]


def _mark(findings: list[Finding]) -> Text:
    if not findings:
        return Text("-", style="dim")
    mark, style = _MARKS[worst_status(findings)]
    return Text(mark, style=style)


def _common_value(findings: list[Finding]) -> str:
    """Return the common value of the hosts whose status is "ok"; an empty text if their values differ."""
    values = {finding.found for finding in findings if finding.status == "ok"}
    return values.pop() if len(values) == 1 else "see below" if not values else ""


def _problems(findings: Iterable[Finding]) -> list[Text]:
    """Return a text per problem, failures first. Hosts with the same problem share one text."""
    problems = [finding for finding in findings if finding.status != "ok"]
    problems.sort(key=lambda f: (f.status != "fail", f.check, f.found, f.remedy))
    texts = []
    for (status, check, found, remedy), group in groupby(
        problems, lambda f: (f.status, f.check, f.found, f.remedy)
    ):
        text = Text()
        text.append(f"\n{_TITLES[status]}", style=_MARKS[status][1])
        text.append(f"  {summarize_names([finding.host for finding in group])}: {check}: {found}\n")
        text.append(f"      {remedy}")
        texts.append(text)
    return texts


def _conclusion(diagnosis: Diagnosis) -> Text:
    hosts = diagnosis.report.hosts
    fails = {f.host for f in diagnosis.findings if f.status == "fail"}
    warnings = [f for f in diagnosis.findings if f.status == "warn"]
    number = counted(len(hosts), "host")
    notes = f", {counted(len(warnings), 'warning')}" if warnings else ""
    if fails:
        names = summarize_names([host.name for host in hosts if host.name in fails])
        return Text(f"\n{number}: a job would fail because of {names}{notes}", style="bold red")
    return Text(f"\n{number}: ready{notes}", style="bold green")


def _show_speed(diagnosis: Diagnosis, console: Console) -> None:
    report = diagnosis.report
    if computed := compute_results(report):
        console.print(_compute_line(report))
    if any(len(rates) > 1 for rates in pair_times(report).values()) and computed:
        console.print(_pairs(report))
    if len(seconds := diagnosis.horovod.get("seconds", {})) > 1:
        console.print(_allreduce(diagnosis, seconds))


def _compute_line(report: Report) -> Text:
    rates = [
        f"{name} {result['gflops']:.0f}"
        for name, result in compute_results(report).items()
        if "gflops" in result
    ]
    return Text(f"\ncompute, GFLOP/s on one thread: {', '.join(rates)}")


def _pairs(report: Report) -> Table:
    used = next((times.get("used", "TCP") for times in pair_times(report).values()), "TCP")
    table = _speed_table(f"messages between hosts, over {used}", "hosts", "latency")
    for (first, second), times in pair_times(report).items():
        pair = f"{first[:_NAME_WIDTH]} - {second[:_NAME_WIDTH]}"
        if "error" in times:
            table.add_row(pair, times["error"])
            continue
        rates = [bytes_per_second(times, size) for size in SIZES[1:]]
        table.add_row(pair, _time(latency_seconds(times)), *(_rate(rate) for rate in rates))
    return table


def _allreduce(diagnosis: Diagnosis, seconds: dict[str, float]) -> Table:
    workers = diagnosis.horovod["workers"]
    title = f"all-reduce by Horovod over {diagnosis.horovod['controller']}, bus bandwidth"
    table = _speed_table(title, "workers", "time of 1 KiB")
    rates = [
        bus_bytes_per_second(size, workers, seconds[str(size)]) if str(size) in seconds else None
        for size in SIZES[1:]
    ]
    table.add_row(str(workers), _time(seconds[str(SIZES[0])]), *(_rate(rate) for rate in rates))
    return table


def _speed_table(title: str, first: str, second: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="", box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    table.add_column(second, justify="right")
    for size in SIZES[1:]:
        name = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _rate(bytes_per_second: float | None) -> str:
    """Return a bandwidth as a text in MB/s; a MB is 10^6 bytes."""
    return "-" if bytes_per_second is None else f"{bytes_per_second / 1e6:,.0f} MB/s"
