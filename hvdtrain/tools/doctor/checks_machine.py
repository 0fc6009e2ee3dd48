"""Checks of directories, disks, memory, cores and GPUs."""

from hvdtrain.storage.text import counted
from hvdtrain.tools.doctor.report import Finding, Host, HostInfo, Report, Status, compare, summarize_names

_RUN_FAIL_MIB, _RUN_WARN_MIB = 64, 1024
_TEMPORARY_FAIL_MIB, _TEMPORARY_WARN_MIB = 8, 256
_SHARED_MEMORY_MIB = 16  # what Open MPI uses for each worker
_LOCKED_WARN_BYTES = 64 * 2**20


def check_machines(report: Report) -> list[Finding]:
    """Check the directories, disks, memory, cores and GPUs of all hosts."""
    findings = _directories(report) + _shared(report)
    first_name = report.hosts[0].name if report.hosts else ""
    for host, info in report.responding:
        findings += [
            _run_disk(host, info, host.name == first_name),
            _temporary_disk(host, info),
            _shared_memory(host, info, host.name == first_name),
            _locked_memory(host, info),
            _cores(host, info),
        ]
    return findings + _gpus(report)


def _directories(report: Report) -> list[Finding]:
    findings = []
    for host, info in report.responding:
        if info["directory"] == report.directory:
            findings.append(Finding(host.name, "working directory", "ok", report.directory))
            continue
        found = f"it is {info['directory'] or 'deleted'}; {report.directory} is missing there"
        remedy = "Create it there, with the same files: workers read configs and tasks from it."
        findings.append(Finding(host.name, "working directory", "fail", found, remedy))
    return findings


def _shared(report: Report) -> list[Finding]:
    """Check whether all hosts see the run directory of the first host."""
    if len(report.responding) < 2 or not any(report.answers.get("marker") or []):
        return []
    findings = []
    for index, host in enumerate(report.hosts):
        if host.info is None:
            continue
        if report.answer("marker seen", index):
            findings.append(Finding(host.name, "run directory", "ok", "shared"))
            continue
        path = host.info["disks"]["run directory"]["path"]
        found = f"{path} is not the same as on {report.hosts[0].name}: it is not shared"
        remedy = (
            "A job runs, since only rank 0's host writes and reads it. But --resume needs rank 0 on the same "
            "host again. Otherwise put it on a shared file system (--run-dir)."
        )
        findings.append(Finding(host.name, "run directory", "warn", found, remedy))
    return findings


def _run_disk(host: Host, info: HostInfo, is_first: bool) -> Finding:
    disk, check = info["disks"]["run directory"], "run directory's disk"
    failure: Status = "fail" if is_first else "warn"
    who = "" if is_first else " (only rank 0 writes there)"
    if disk["error"]:
        found = f"nothing can be written to {disk['path']}: {disk['error']}{who}"
        return Finding(
            host.name, check, failure, found, "Free some space or fix its permissions, or see --run-dir."
        )
    if disk["free_mib"] < _RUN_WARN_MIB:
        status = failure if disk["free_mib"] < _RUN_FAIL_MIB else "warn"
        found = f"{_size(disk['free_mib'])} free in {disk['path']}{who}"
        return Finding(host.name, check, status, found, "Free some space, or see --run-dir and --keep-last.")
    return Finding(host.name, check, "ok", f"more than {_size(_RUN_WARN_MIB)} free")


def _temporary_disk(host: Host, info: HostInfo) -> Finding:
    disk, check = info["disks"]["temporary directory"], "temporary directory"
    remedy = "Free some space there, or set TMPDIR to another folder."
    if disk["error"]:
        found = f"nothing can be written to {disk['path']}: {disk['error']}"
        return Finding(host.name, check, "fail", found, remedy)
    if disk["free_mib"] < _TEMPORARY_WARN_MIB:
        status: Status = "fail" if disk["free_mib"] < _TEMPORARY_FAIL_MIB else "warn"
        return Finding(host.name, check, status, f"{_size(disk['free_mib'])} free in {disk['path']}", remedy)
    return Finding(host.name, check, "ok", f"more than {_size(_TEMPORARY_WARN_MIB)} free")


def _shared_memory(host: Host, info: HostInfo, is_first: bool) -> Finding:
    """Horovodrun needs it on its own host, and NCCL on all hosts. Open MPI falls back to TCP, slowly."""
    disk, check = info["disks"]["/dev/shm"], "/dev/shm"
    remedy = (
        "Remove old files there, or enlarge it: mount -o remount,size=1g /dev/shm; docker run --shm-size=1g."
    )
    if disk["error"]:
        status: Status = "fail" if is_first or info["gpus"]["cards"] else "warn"
        who = " (so horovodrun cannot start jobs from this host)" if is_first else ""
        return Finding(
            host.name, check, status, f"nothing can be written to it: {disk['error']}{who}", remedy
        )
    if host.slots > 1 and disk["free_mib"] < _SHARED_MEMORY_MIB * host.slots:
        found = f"{_size(disk['free_mib'])} free for {host.slots} workers"
        return Finding(host.name, check, "warn", found, remedy)
    return Finding(host.name, check, "ok", "enough free")


def _locked_memory(host: Host, info: HostInfo) -> Finding:
    limit, check = info["locked_memory_bytes"], "locked memory"
    needed = info["infiniband"] or info["gpus"]["cards"]
    found = "unlimited" if limit < 0 else f"limit {_size(limit // 2**20)}"
    if needed and 0 <= limit < _LOCKED_WARN_BYTES:
        remedy = (
            "InfiniBand and GPUs pin memory: raise the limit (ulimit -l unlimited; limits.conf; LimitMEMLOCK "
            "of sshd)."
        )
        return Finding(host.name, check, "warn", found, remedy)
    return Finding(host.name, check, "ok", found if needed else "not needed")


def _cores(host: Host, info: HostInfo) -> Finding:
    cores, check = info["cores"], "cores"
    if host.slots > cores:
        found = f"{host.slots} workers on {counted(cores, 'core')}: they take turns"
        return Finding(
            host.name, check, "warn", found, "Training works but is slow. Give the host fewer slots."
        )
    return Finding(host.name, check, "ok", f"{host.slots} of {cores}")


def _gpus(report: Report) -> list[Finding]:
    check = "GPUs"
    if not any(info["gpus"]["cards"] or info["gpus"]["error"] for _, info in report.responding):
        return [Finding(host.name, check, "ok", "no GPU") for host, _ in report.responding]
    most = max(len(info["gpus"]["cards"]) for _, info in report.responding)
    findings = []
    for host, info in report.responding:
        cards, error = info["gpus"]["cards"], info["gpus"]["error"]
        others = [
            other.name for other, its_info in report.responding if len(its_info["gpus"]["cards"]) == most
        ]
        if error:
            findings.append(
                Finding(host.name, check, "fail", f"nvidia-smi: {error}", "Repair the driver there.")
            )
        elif not cards:
            found = f"no GPU; {most} on {summarize_names(others)}"
            remedy = "Leave this host out, or train on CPUs on all hosts (--device cpu)."
            findings.append(Finding(host.name, check, "fail", found, remedy))
        elif host.slots > len(cards):
            found, remedy = (
                f"{host.slots} workers for {len(cards)} GPUs",
                "Each worker needs a GPU of its own: give the host fewer slots.",
            )
            findings.append(Finding(host.name, check, "fail", found, remedy))
        else:
            findings.append(Finding(host.name, check, "ok", _describe_cards(info)))
    return findings + _gpu_software(report)


def _gpu_software(report: Report) -> list[Finding]:
    """Check driver, NCCL and peer access on hosts with GPUs."""
    findings = compare(
        report, "GPU driver", lambda info: ", ".join(sorted({c["driver"] for c in info["gpus"]["cards"]})),
        "Install the same driver on every host.", status="warn", missing="none",
    )  # fmt: skip
    findings += compare(
        report, "NCCL", lambda info: info["software"]["gpus"].get("torch", {}).get("nccl", ""),
        "Install the same PyTorch, with the same NCCL, on every host.", status="warn", missing="none",
    )  # fmt: skip
    for host, info in report.responding:
        if not info["gpus"]["cards"]:
            continue
        if not info["software"]["nccl_build"]:
            remedy = "python -m hvdtrain build-horovod --gpu nccl; or train on CPUs (--device cpu)."
            findings.append(
                Finding(host.name, "Horovod on GPUs", "fail", "Horovod was built without NCCL", remedy)
            )
        for name, seen in info["software"]["gpus"].items():
            if len(seen.get("gpus", [])) < len(info["gpus"]["cards"]):
                found = f"{name} sees {len(seen.get('gpus', []))} of {len(info['gpus']['cards'])} GPUs"
                findings.append(Finding(host.name, "GPUs", "warn", found, "See CUDA_VISIBLE_DEVICES there."))
        pairs = info["software"]["gpus"].get("torch", {}).get("no_peer_access", [])
        if pairs:
            found = f"no peer access between {len(pairs) // 2} pairs of GPUs"
            remedy = (
                "Copies go through main memory. See nvidia-smi topo -p2p r, and ACS and IOMMU in the BIOS."
            )
            findings.append(Finding(host.name, "peer access", "warn", found, remedy))
    return findings


def _describe_cards(info: HostInfo) -> str:
    cards = info["gpus"]["cards"]
    kinds = sorted({f"{card['name']}, {int(card['memory_mib']) // 1024} GiB" for card in cards})
    return f"{len(cards)} x {' and '.join(kinds)}"


def _size(mib: int) -> str:
    return f"{mib / 1024:.0f} GiB" if mib >= 1024 else f"{mib} MiB"
