"""What the hosts reported, and what the checks found in it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hvdtrain.errors import EXIT_DONE, EXIT_ENVIRONMENT

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
    """Compare one value across the hosts; a host that differs from the majority gets the status.

    If several values are equally frequent, the one that comes first in the order of hosts is expected.
    ``missing`` is shown for an empty value.
    """
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
