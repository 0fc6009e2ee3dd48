"""An examination's results for machines; docs/doctor.md describes the fields."""

import json
from typing import Any

import hvdtrain
from hvdtrain.doctor.checks_speed import computing, pair_times
from hvdtrain.doctor.speed import bus_bytes_per_second, bytes_per_second, latency_seconds
from hvdtrain.doctor.verdicts import Diagnosis

_FORMAT = 1
_NOT_TOLD = ("name", "slots", "leads", "process")


def as_json(diagnosis: Diagnosis) -> str:
    """Give the results as one JSON document on one line."""
    case = diagnosis.case
    hosts = [
        {
            "name": host.name,
            "slots": host.slots,
            "facts": {name: value for name, value in (host.facts or {}).items() if name not in _NOT_TOLD}
            or None,
        }
        for host in case.hosts
    ]
    return json.dumps(
        {
            "format": _FORMAT,
            "hvdtrain": hvdtrain.__version__,
            "how": diagnosis.how,
            "exit_code": diagnosis.exit_code,
            "hosts": hosts,
            "findings": [vars(finding) for finding in diagnosis.findings],
            "compute": computing(case),
            "messages": [
                {"hosts": list(pair), **_message_speeds(times)} for pair, times in pair_times(case).items()
            ],
            "allreduce": _allreduce(diagnosis),
        }
    )


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
    members = horovod["size"]
    return {
        "workers": members,
        "controller": horovod["controller"],
        "seconds": horovod["seconds"],
        "bus_bytes_per_second": {
            size: bus_bytes_per_second(int(size), members, seconds)
            for size, seconds in horovod["seconds"].items()
        },
    }
