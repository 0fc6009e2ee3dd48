"""What the hosts reported, and what the checks found in it; printed as a table or as a JSON document."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

import hvdtrain
from hvdtrain.errors import EXIT_DONE, EXIT_ENVIRONMENT
from hvdtrain.storage.text import counted

Status = Literal["ok", "warn", "fail"]
Verdict = tuple[Status, str, str]  # status, found, remedy; see Finding
HostInfo = Mapping[str, Any]  # what a host reports about itself, in JSON's types; see collect_host_info
_SEVERITY: tuple[Status, ...] = ("ok", "warn", "fail")


class Finding(NamedTuple):
    """The result of one check on one host."""

    host: str  # the host's name
    check: str  # the check's name
    status: Status  # "fail" if a job would fail, "warn" if it would run slowly or not as intended, else "ok"
    found: str  # what was found
    remedy: str = ""  # what to do; empty if the status is "ok"


@dataclass(frozen=True)
class Host:
    """A host of the job."""

    name: str  # its name in the host list or from the launcher
    slots: int  # number of workers that are to run there
    info: HostInfo | None  # what it reported about itself; None if it did not respond
    problem: Finding | None = None  # why it did not respond


@dataclass(frozen=True)
class Report:
    """What all hosts reported; the input of the checks."""

    hosts: tuple[Host, ...]  # all hosts of the job; the first one is that of rank 0
    agents: tuple[int, ...]  # for each of ``hosts``, the index of its agent in the lists of ``answers``
    # for each step, one answer per agent; None for an agent that did not answer
    answers: Mapping[str, list[Any]]
    directory: str  # the working directory that all hosts should have

    @property
    def responding(self) -> list[tuple[Host, HostInfo]]:
        """The hosts that responded, each with what it reported about itself."""
        return [(host, host.info) for host in self.hosts if host.info is not None]

    def answer(self, step: str, index: int) -> Any:
        """Return the answer in a step of the host at an index of ``hosts``, or None if it gave none."""
        values = self.answers.get(step)
        return values[self.agents[index]] if values else None

    def each(self, check: str, judge: Callable[[Host, HostInfo], Verdict]) -> list[Finding]:
        """Return a finding for each host that responded."""
        return [Finding(host.name, check, *judge(host, info)) for host, info in self.responding]


@dataclass(frozen=True)
class Diagnosis:
    """A report with the findings of all checks."""

    report: Report  # what the hosts reported
    transport: str  # title of the transport that carried the hosts' answers
    findings: tuple[Finding, ...]  # of all checks, in the order of the checks
    # the result of starting Horovod; empty if it was not started
    horovod: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """3 if a job would fail, else 0."""
        return EXIT_ENVIRONMENT if worst_status(self.findings) == "fail" else EXIT_DONE


def worst_status(findings: Iterable[Finding]) -> Status:
    """Return the worst status of the findings; "ok" if there are none."""
    return max((finding.status for finding in findings), key=_SEVERITY.index, default="ok")


def compare(
    report: Report,
    check: str,
    value_of: Callable[[HostInfo], str],
    remedy: str,
    status: Status = "fail",
    *,
    missing: str = "not installed",
) -> list[Finding]:
    """Compare one value across the hosts; a host that differs from the majority gets the status."""
    values = [(host.name, value_of(info) or missing) for host, info in report.responding]
    counts = Counter(value for _, value in values)
    expected = max(counts, key=counts.__getitem__, default="")  # of equal counts, the first
    others = summarize_names([name for name, value in values if value == expected])
    return [
        Finding(name, check, "ok", value)
        if value == expected
        else Finding(name, check, status, f"{value}; {expected} on {others}", remedy)
        for name, value in values
    ]


def summarize_names(names: list[str]) -> str:
    """Return the names as a text: up to four names in full, otherwise three and the number of the others."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


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
        "allreduce": dict(diagnosis.horovod) if diagnosis.horovod.get("workers") else None,
    }
    return json.dumps(document)


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the table of checks, each problem with its remedy, and the conclusion."""
    names = [host.name for host in diagnosis.report.hosts]
    console.print(_checks_table(diagnosis, names))
    if _MAX_NAMED < len(names) <= _MAX_NUMBERED:
        legend = "  ".join(f"{number} {name}" for number, name in enumerate(names, start=1))
        console.print(Text(f"hosts: {legend}"))
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
        of_hosts = [[finding for finding in findings if finding.host == name] for name in hosts]
        statuses = [worst_status(of_host) if of_host else None for of_host in of_hosts]
        looks = [_LOOK[status] if status else ("-", "", "dim") for status in statuses]
        cells = [Text(mark, style=style) for mark, _, style in looks]
        if len(hosts) > _MAX_NUMBERED:
            counts = [f"{statuses.count(kind)} {_LOOK[kind][1]}" for kind in _LOOK if kind in statuses]
            cells = [Text(", ".join(counts), style=_LOOK[worst_status(findings)][2])]
        table.add_row(check, *cells, common)
    return table
