"""Print a diagnosis as JSON; docs/doctor.md describes the fields."""

import json
from typing import Any

import hvdtrain
from hvdtrain.doctor.checks_speed import compute_results, pair_times
from hvdtrain.doctor.diagnosis import Diagnosis
from hvdtrain.tools.doctor.report import Finding
from hvdtrain.tools.doctor.speed import bus_bytes_per_second, bytes_per_second, latency_seconds

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
            "allreduce": _allreduce(diagnosis),
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


def _allreduce(diagnosis: Diagnosis) -> dict[str, Any] | None:
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
