"""All checks of an examination, and what follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.doctor.case import Case
from hvdtrain.doctor.checks_machine import check_machines
from hvdtrain.doctor.checks_network import check_network
from hvdtrain.doctor.checks_software import check_software
from hvdtrain.doctor.checks_speed import check_speed
from hvdtrain.doctor.findings import Finding, worst
from hvdtrain.errors import EXIT_DONE, EXIT_ENVIRONMENT

_CHECKS = (check_software, check_network, check_machines, check_speed)


@dataclass(frozen=True)
class Diagnosis:
    """An examination with its findings.

    Attributes:
        case: the examination.
        how: by what means hosts told each other what they found.
        findings: of all checks, in their order.
        horovod: what starting Horovod gave; empty where it was not started.
    """

    case: Case
    how: str
    findings: tuple[Finding, ...]
    horovod: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """3 where the job would fail, else 0."""
        return EXIT_ENVIRONMENT if worst(self.findings) == "fail" else EXIT_DONE


def diagnose(case: Case, how: str) -> Diagnosis:
    """Do all checks."""
    findings = [host.problem for host in case.hosts if host.problem]
    if case.heard:
        for check in _CHECKS:
            findings += check(case)
    return Diagnosis(case, how, tuple(findings))


def with_horovod(diagnosis: Diagnosis, outcome: Mapping[str, Any], host_of: list[str]) -> Diagnosis:
    """Add what starting Horovod gave.

    Args:
        diagnosis: what was found before.
        outcome: as start_horovod gives it.
        host_of: host's name by worker.
    """
    check = "Horovod starts"
    errors: dict[str, str] = {}
    for rank, error in enumerate(outcome.get("errors", [])):
        if error:
            errors.setdefault(host_of[rank], f"rank {rank}: {error}")
    remedy = "Start it again with HOROVOD_LOG_LEVEL=debug, and see what it waits for."
    findings = [
        Finding(host.name, check, "fail", errors[host.name], remedy)
        if host.name in errors
        else Finding(host.name, check, "ok", "" if errors else f"over {outcome['controller']}")
        for host in diagnosis.case.hosts
    ]
    return Diagnosis(diagnosis.case, diagnosis.how, (*diagnosis.findings, *findings), outcome)
