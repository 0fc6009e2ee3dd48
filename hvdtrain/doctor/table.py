"""An examination's results for people."""

from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.doctor.case import Case, in_short
from hvdtrain.doctor.checks_speed import computing, pair_times
from hvdtrain.doctor.findings import Finding, Verdict, worst
from hvdtrain.doctor.speed import KIB, MIB, SIZES, bus_bytes_per_second, bytes_per_second, latency_seconds
from hvdtrain.doctor.verdicts import Diagnosis

_MARKS: dict[Verdict, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warn": ("!", "yellow"),
    "fail": ("X", "bold red"),
}
_WORDS: dict[Verdict, str] = {"ok": "ok", "warn": "warning", "fail": "FAIL"}
_NAMED = 4  # up to so many hosts have a column with their name
_NUMBERED = 16  # up to so many have one with a number; beyond, hosts are counted
_NAME_WIDTH = 12


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the table, what was measured, what is wrong with its remedy, and the verdict."""
    hosts = diagnosis.case.hosts
    numbered = _NAMED < len(hosts) <= _NUMBERED
    console.print(_checks(diagnosis))
    if numbered:
        legend = "  ".join(f"{number} {host.name}" for number, host in enumerate(hosts, start=1))
        console.print(Text(f"hosts: {legend}"))
    _show_speed(diagnosis, console)
    for lines in _troubles(diagnosis.findings):
        console.print(lines)
    console.print(_verdict(diagnosis))


def _checks(diagnosis: Diagnosis) -> Table:
    """Make the table of checks x hosts; what is equal on all hosts is said once."""
    hosts = [host.name for host in diagnosis.case.hosts]
    checks = list(dict.fromkeys(finding.check for finding in diagnosis.findings))
    table = Table(box=None, pad_edge=False, padding=(0, 2 if len(hosts) <= _NAMED else 1, 0, 0))
    table.add_column("check", no_wrap=True, min_width=max(map(len, checks), default=0))
    if len(hosts) > _NUMBERED:
        table.add_column("hosts", no_wrap=True, min_width=len("16 ok, 16 warning, 16 FAIL"))
    else:
        for number, name in enumerate(hosts, start=1):
            title = name[:_NAME_WIDTH] if len(hosts) <= _NAMED else str(number)
            table.add_column(title, no_wrap=True, justify="center", min_width=max(2, len(title)))
    table.add_column("found", overflow="fold")
    for check in checks:
        of_check = [finding for finding in diagnosis.findings if finding.check == check]
        table.add_row(check, *_cells(hosts, of_check), _said_once(of_check))
    return table


def _cells(hosts: list[str], findings: list[Finding]) -> list[Text]:
    by_host = {name: [f for f in findings if f.host == name] for name in hosts}
    if len(hosts) <= _NUMBERED:
        return [_mark(its) for its in by_host.values()]
    verdicts = [worst(its) for its in by_host.values() if its]
    words = [f"{verdicts.count(kind)} {_WORDS[kind]}" for kind in ("ok", "warn", "fail") if kind in verdicts]
    return [Text(", ".join(words), style=_MARKS[worst(findings)][1])]


def _mark(findings: list[Finding]) -> Text:
    if not findings:
        return Text("-", style="dim")
    mark, style = _MARKS[worst(findings)]
    return Text(mark, style=style)


def _said_once(findings: list[Finding]) -> str:
    """Give what was found where all is well; of values that differ from host to host, nothing."""
    well = {finding.found for finding in findings if finding.verdict == "ok"}
    return well.pop() if len(well) == 1 else "see below" if not well else ""


def _troubles(findings: Iterable[Finding]) -> list[Text]:
    """Say what is wrong, failures first; hosts with the same trouble together."""
    wrong = [finding for finding in findings if finding.verdict != "ok"]
    wrong.sort(key=lambda f: (f.verdict != "fail", f.check, f.found, f.remedy))
    texts = []
    for (verdict, check, found, remedy), group in groupby(
        wrong, lambda f: (f.verdict, f.check, f.found, f.remedy)
    ):
        text = Text()
        text.append(f"\n{_WORDS[verdict]}", style=_MARKS[verdict][1])
        text.append(f"  {in_short([finding.host for finding in group])}: {check}: {found}\n")
        text.append(f"      {remedy}")
        texts.append(text)
    return texts


def _verdict(diagnosis: Diagnosis) -> Text:
    hosts = diagnosis.case.hosts
    fails = {f.host for f in diagnosis.findings if f.verdict == "fail"}
    warnings = [f for f in diagnosis.findings if f.verdict == "warn"]
    number = f"{len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}"
    notes = f", {len(warnings)} {'warning' if len(warnings) == 1 else 'warnings'}" if warnings else ""
    if fails:
        names = in_short([host.name for host in hosts if host.name in fails])
        return Text(f"\n{number}: a job would fail because of {names}{notes}", style="bold red")
    return Text(f"\n{number}: ready{notes}", style="bold green")


def _show_speed(diagnosis: Diagnosis, console: Console) -> None:
    case = diagnosis.case
    if computed := computing(case):
        console.print(_computing(case))
    if any(len(rates) > 1 for rates in pair_times(case).values()) and computed:
        console.print(_pairs(case))
    if len(seconds := diagnosis.horovod.get("seconds", {})) > 1:
        console.print(_allreduce(diagnosis, seconds))


def _computing(case: Case) -> Text:
    rates = [
        f"{name} {result['gflops']:.0f}" for name, result in computing(case).items() if "gflops" in result
    ]
    return Text(f"\ncompute, GFLOP/s on one thread: {', '.join(rates)}")


def _pairs(case: Case) -> Table:
    used = next((times.get("used", "TCP") for times in pair_times(case).values()), "TCP")
    table = _speed_table(f"messages between hosts, by {used}", "hosts", "latency")
    for (first, second), times in pair_times(case).items():
        pair = f"{first[:_NAME_WIDTH]} - {second[:_NAME_WIDTH]}"
        if "error" in times:
            table.add_row(pair, times["error"])
            continue
        rates = [bytes_per_second(times, size) for size in SIZES[1:]]
        table.add_row(pair, _time(latency_seconds(times)), *(_rate(rate) for rate in rates))
    return table


def _allreduce(diagnosis: Diagnosis, seconds: dict[str, float]) -> Table:
    members = diagnosis.horovod["size"]
    title = f"all-reduce of Horovod over {diagnosis.horovod['controller']}, bus bandwidth"
    table = _speed_table(title, "workers", "time of 1 KiB")
    rates = [
        bus_bytes_per_second(size, members, seconds[str(size)]) if str(size) in seconds else None
        for size in SIZES[1:]
    ]
    table.add_row(str(members), _time(seconds[str(SIZES[0])]), *(_rate(rate) for rate in rates))
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
    """Say a bandwidth in MB/s of 10^6 bytes."""
    return "-" if bytes_per_second is None else f"{bytes_per_second / 1e6:,.0f} MB/s"
