"""What a check found on a host."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["ok", "warn", "fail"]
Facts = Mapping[str, Any]
_ORDER: dict[Verdict, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Finding:
    """A check's answer for one host.

    Attributes:
        host: the host's name.
        check: the check's name.
        verdict: "fail" where a job would fail, "warn" where it would run, but worse or not as wanted.
        found: what was found.
        remedy: what to do; empty where all is well.
    """

    host: str
    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Host:
    """A host that was to be examined.

    Attributes:
        name: as the user or the launcher calls it.
        slots: workers that are to run there.
        facts: what it said about itself; None where it said nothing.
        problem: why it said nothing.
    """

    name: str
    slots: int
    facts: Facts | None
    problem: Finding | None = None


def worst(findings: Iterable[Finding]) -> Verdict:
    """Give the worst verdict; "ok" of none."""
    return max((finding.verdict for finding in findings), key=_ORDER.__getitem__, default="ok")
