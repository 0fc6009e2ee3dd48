"""Checks of directories, disks, memory, cores and GPUs."""

from hvdtrain.doctor.case import Case, compare, in_short
from hvdtrain.doctor.findings import Facts, Finding, Host, Verdict

_RUN_FAIL_MIB, _RUN_WARN_MIB = 64, 1024
_TEMPORARY_FAIL_MIB, _TEMPORARY_WARN_MIB = 8, 256
_SHARED_MEMORY_MIB = 16  # what Open MPI takes for each worker
_LOCKED_WARN_BYTES = 64 * 2**20


def check_machines(case: Case) -> list[Finding]:
    """Check what hosts have."""
    findings = _directories(case) + _shared(case)
    first = case.hosts[0].name if case.hosts else ""
    for host, facts in case.heard:
        findings += [
            _run_disk(host, facts, host.name == first),
            _temporary_disk(host, facts),
            _shared_memory(host, facts, host.name == first),
            _locked_memory(host, facts),
            _cores(host, facts),
        ]
    return findings + _gpus(case)


def _directories(case: Case) -> list[Finding]:
    findings = []
    for host, facts in case.heard:
        if facts["directory"] == case.directory:
            findings.append(Finding(host.name, "working directory", "ok", case.directory))
            continue
        found = f"it is {facts['directory'] or 'gone'}; {case.directory} is missing there"
        remedy = "Make it there, with the same files: configs and tasks are looked for in it."
        findings.append(Finding(host.name, "working directory", "fail", found, remedy))
    return findings


def _shared(case: Case) -> list[Finding]:
    """Whether all hosts see the run directory of the first."""
    if len(case.heard) < 2 or not any(case.record.get("mark") or []):
        return []
    findings = []
    for place, host in enumerate(case.hosts):
        if host.facts is None:
            continue
        if case.said("seen", place):
            findings.append(Finding(host.name, "run directory", "ok", "shared"))
            continue
        path = host.facts["disks"]["run directory"]["path"]
        found = f"{path} is not the one of {case.hosts[0].name}: it is not shared"
        remedy = (
            "Only rank 0's host writes and reads it, so a job runs. But --resume needs rank 0 on the same "
            "host again; or put it on a shared file system (--run-dir)."
        )
        findings.append(Finding(host.name, "run directory", "warn", found, remedy))
    return findings


def _run_disk(host: Host, facts: Facts, first: bool) -> Finding:
    disk, check = facts["disks"]["run directory"], "run directory's disk"
    fails: Verdict = "fail" if first else "warn"
    who = "" if first else " (only rank 0 writes there)"
    if disk["error"]:
        found = f"nothing can be written to {disk['path']}: {disk['error']}{who}"
        return Finding(host.name, check, fails, found, "Make room or give it to the user, or see --run-dir.")
    if disk["free_mib"] < _RUN_WARN_MIB:
        verdict = fails if disk["free_mib"] < _RUN_FAIL_MIB else "warn"
        found = f"{_size(disk['free_mib'])} free in {disk['path']}{who}"
        return Finding(host.name, check, verdict, found, "Make room, or see --run-dir and --keep-last.")
    return Finding(host.name, check, "ok", f"more than {_size(_RUN_WARN_MIB)} free")


def _temporary_disk(host: Host, facts: Facts) -> Finding:
    disk, check = facts["disks"]["temporary directory"], "temporary directory"
    remedy = "Make room there, or set TMPDIR to another folder."
    if disk["error"]:
        found = f"nothing can be written to {disk['path']}: {disk['error']}"
        return Finding(host.name, check, "fail", found, remedy)
    if disk["free_mib"] < _TEMPORARY_WARN_MIB:
        verdict: Verdict = "fail" if disk["free_mib"] < _TEMPORARY_FAIL_MIB else "warn"
        return Finding(host.name, check, verdict, f"{_size(disk['free_mib'])} free in {disk['path']}", remedy)
    return Finding(host.name, check, "ok", f"more than {_size(_TEMPORARY_WARN_MIB)} free")


def _shared_memory(host: Host, facts: Facts, first: bool) -> Finding:
    """Horovodrun itself needs some on its host, and NCCL on all; Open MPI makes do with TCP, slowly."""
    disk, check = facts["disks"]["/dev/shm"], "/dev/shm"
    remedy = (
        "Remove old files there, or enlarge it: mount -o remount,size=1g /dev/shm; docker run --shm-size=1g."
    )
    if disk["error"]:
        verdict: Verdict = "fail" if first or facts["gpus"]["cards"] else "warn"
        who = " (horovodrun starts nothing from this host then)" if first else ""
        return Finding(
            host.name, check, verdict, f"nothing can be written to it: {disk['error']}{who}", remedy
        )
    if host.slots > 1 and disk["free_mib"] < _SHARED_MEMORY_MIB * host.slots:
        found = f"{_size(disk['free_mib'])} free for {host.slots} workers"
        return Finding(host.name, check, "warn", found, remedy)
    return Finding(host.name, check, "ok", "enough free")


def _locked_memory(host: Host, facts: Facts) -> Finding:
    limit, check = facts["locked_memory_bytes"], "locked memory"
    needed = facts["infiniband"] or facts["gpus"]["cards"]
    said = "unlimited" if limit < 0 else f"limit {_size(limit // 2**20)}"
    if needed and 0 <= limit < _LOCKED_WARN_BYTES:
        remedy = "Raise it (ulimit -l unlimited; limits.conf; LimitMEMLOCK of sshd): InfiniBand and GPUs pin."
        return Finding(host.name, check, "warn", said, remedy)
    return Finding(host.name, check, "ok", said if needed else "not needed")


def _cores(host: Host, facts: Facts) -> Finding:
    cores, check = facts["cores"], "cores"
    if host.slots > cores:
        found = f"{host.slots} workers on {cores} {'core' if cores == 1 else 'cores'}: they take turns"
        return Finding(host.name, check, "warn", found, "It trains, slowly. Give fewer slots.")
    return Finding(host.name, check, "ok", f"{host.slots} of {cores}")


def _gpus(case: Case) -> list[Finding]:
    check = "GPUs"
    if not any(facts["gpus"]["cards"] or facts["gpus"]["error"] for _, facts in case.heard):
        return [Finding(host.name, check, "ok", "no GPU") for host, _ in case.heard]
    most = max(len(facts["gpus"]["cards"]) for _, facts in case.heard)
    findings = []
    for host, facts in case.heard:
        cards, error = facts["gpus"]["cards"], facts["gpus"]["error"]
        others = [other.name for other, its in case.heard if len(its["gpus"]["cards"]) == most]
        if error:
            findings.append(
                Finding(host.name, check, "fail", f"nvidia-smi: {error}", "Mend the driver there.")
            )
        elif not cards:
            found = f"no GPU; {most} on {in_short(others)}"
            remedy = "Leave this host out, or train on CPUs everywhere (--device cpu)."
            findings.append(Finding(host.name, check, "fail", found, remedy))
        elif host.slots > len(cards):
            found, remedy = (
                f"{host.slots} workers for {len(cards)} GPUs",
                "One worker takes one: give fewer slots.",
            )
            findings.append(Finding(host.name, check, "fail", found, remedy))
        else:
            findings.append(Finding(host.name, check, "ok", _said_of_cards(facts)))
    return findings + _gpu_software(case)


def _gpu_software(case: Case) -> list[Finding]:
    """Driver, NCCL and peer access, where there are cards."""
    findings = compare(
        case, "GPU driver", lambda facts: ", ".join(sorted({c["driver"] for c in facts["gpus"]["cards"]})),
        "Install the same driver on every host.", verdict="warn", missing="none",
    )  # fmt: skip
    findings += compare(
        case, "NCCL", lambda facts: facts["software"]["gpus"].get("torch", {}).get("nccl", ""),
        "Install the same PyTorch, with the same NCCL, on every host.", verdict="warn", missing="none",
    )  # fmt: skip
    for host, facts in case.heard:
        if not facts["gpus"]["cards"]:
            continue
        if not facts["software"]["nccl_build"]:
            remedy = "python -m hvdtrain build-horovod --gpu nccl; or train on CPUs (--device cpu)."
            findings.append(
                Finding(host.name, "Horovod on GPUs", "fail", "Horovod was built without NCCL", remedy)
            )
        for name, seen in facts["software"]["gpus"].items():
            if len(seen.get("gpus", [])) < len(facts["gpus"]["cards"]):
                found = f"{name} sees {len(seen.get('gpus', []))} of {len(facts['gpus']['cards'])} GPUs"
                findings.append(Finding(host.name, "GPUs", "warn", found, "See CUDA_VISIBLE_DEVICES there."))
        pairs = facts["software"]["gpus"].get("torch", {}).get("no_peer_access", [])
        if pairs:
            found = f"no peer access between {len(pairs) // 2} pairs of GPUs"
            remedy = "Copies go through main memory. See nvidia-smi topo -p2p r; ACS and IOMMU in the BIOS."
            findings.append(Finding(host.name, "peer access", "warn", found, remedy))
    return findings


def _said_of_cards(facts: Facts) -> str:
    cards = facts["gpus"]["cards"]
    kinds = sorted({f"{card['name']}, {int(card['memory_mib']) // 1024} GiB" for card in cards})
    return f"{len(cards)} x {' and '.join(kinds)}"


def _size(mib: int) -> str:
    return f"{mib / 1024:.0f} GiB" if mib >= 1024 else f"{mib} MiB"
