"""Run all checks on a report, and derive the exit code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.doctor.checks_software import check_software
from hvdtrain.doctor.checks_speed import check_speed
from hvdtrain.errors import EXIT_DONE, EXIT_ENVIRONMENT
from hvdtrain.tools.doctor.checks_machine import check_machines
from hvdtrain.tools.doctor.checks_network import check_network
from hvdtrain.tools.doctor.report import Finding, Report, worst_status

_CHECKS = (check_software, check_network, check_machines, check_speed)


@dataclass(frozen=True)
class Diagnosis:
    """A report with the findings of all checks.

    Attributes:
        report: what the hosts reported.
        transport: title of the transport that carried the hosts' answers.
        findings: of all checks, in the order of the checks.
        horovod: the result of :func:`~hvdtrain.doctor.horovod_start.start_horovod`; empty if Horovod was
            not started.
    """

    report: Report
    transport: str
    findings: tuple[Finding, ...]
    horovod: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """3 if a job would fail, else 0."""
        return EXIT_ENVIRONMENT if worst_status(self.findings) == "fail" else EXIT_DONE


def diagnose(report: Report, transport: str) -> Diagnosis:
    """Run all checks on a report.

    Args:
        report: what the hosts reported.
        transport: title of the transport that carried the hosts' answers.
    """
    findings = [host.problem for host in report.hosts if host.problem]
    if report.responding:
        for check in _CHECKS:
            findings += check(report)
    return Diagnosis(report, transport, tuple(findings))


def add_horovod_result(diagnosis: Diagnosis, result: Mapping[str, Any], host_of: list[str]) -> Diagnosis:
    """Return the diagnosis with a finding per host on the start of Horovod.

    Args:
        diagnosis: the findings so far.
        result: what ``start_horovod`` returned.
        host_of: for each rank, the name of its host.
    """
    check = "Horovod starts"
    errors: dict[str, str] = {}
    for rank, error in enumerate(result.get("errors", [])):
        if error:
            errors.setdefault(host_of[rank], f"rank {rank}: {error}")
    remedy = "Start the doctor again with HOROVOD_LOG_LEVEL=debug to see what Horovod waits for."
    findings = [
        Finding(host.name, check, "fail", errors[host.name], remedy)
        if host.name in errors
        else Finding(host.name, check, "ok", "" if errors else f"over {result['controller']}")
        for host in diagnosis.report.hosts
    ]
    return Diagnosis(diagnosis.report, diagnosis.transport, (*diagnosis.findings, *findings), result)
