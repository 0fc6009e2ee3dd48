"""All that an examination found, host by host: what the checks are given."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.doctor.findings import Facts, Finding, Host, Verdict


@dataclass(frozen=True)
class Case:
    """An examination's results.

    Attributes:
        hosts: all hosts that were to be examined, the first being that of rank 0.
        members: a host's number in the record's lists, by its place among ``hosts``.
        record: what was said, by step; by members.
        directory: the working directory that all should have.
    """

    hosts: tuple[Host, ...]
    members: tuple[int, ...]
    record: Mapping[str, list[Any]]
    directory: str

    @property
    def heard(self) -> list[tuple[Host, Facts]]:
        """The hosts that said something, with what they said."""
        return [(host, host.facts) for host in self.hosts if host.facts is not None]

    def said(self, step: str, place: int) -> Any:
        """Give what a host said in a step; None where it said nothing."""
        values = self.record.get(step)
        return values[self.members[place]] if values else None


def compare(
    case: Case,
    check: str,
    value_of: Callable[[Facts], str],
    remedy: str,
    *,
    verdict: Verdict = "fail",
    missing: str = "not installed",
) -> list[Finding]:
    """Compare one value of all hosts: those that have another than most have are named.

    Where as many have one as the other, the first host's value is the rule.

    Args:
        case: the examination.
        check: the check's name.
        value_of: gives the value from a host's facts; empty where it has none.
        remedy: what to do where values differ.
        verdict: of a host that differs.
        missing: how to call an empty value.
    """
    values = [(host.name, value_of(facts) or missing) for host, facts in case.heard]
    counts = Counter(value for _, value in values)
    rule = max(counts, key=counts.__getitem__, default="")  # the first one of equals
    findings = []
    for name, value in values:
        if value == rule:
            findings.append(Finding(name, check, "ok", value))
            continue
        others = [other for other, its in values if its == rule]
        findings.append(Finding(name, check, verdict, f"{value}; {rule} on {in_short(others)}", remedy))
    return findings


def in_short(names: list[str]) -> str:
    """Name hosts, not all of many."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
