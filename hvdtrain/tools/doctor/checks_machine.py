"""Checks of directories, disks, memory, cores and GPUs."""

from functools import partial

from hvdtrain.horovod_build.installed import BUILD_COMMAND, TITLES
from hvdtrain.storage.text import counted
from hvdtrain.tools.doctor.report import Finding, Host, HostInfo, Report, Status, compare, summarize_names
from hvdtrain.tools.doctor.software import advice

_SAME = "Install the same version on every host; an image or a shared environment keeps them equal."
# by name: the status of a host whose version differs, and the remedy
_VERSIONS: dict[str, tuple[Status, str]] = {
    "hvdtrain": ("fail", "Install the same version of hvdtrain, from the same source, on every host."),
    "PyTorch": ("fail", f"{_SAME} Then build Horovod there: {BUILD_COMMAND}"),
    "TensorFlow": ("fail", f"{_SAME} Then build Horovod there: {BUILD_COMMAND}"),
    "Keras": ("fail", _SAME),
    "NumPy": ("warn", _SAME),
    "mpi4py": ("warn", _SAME),
    "Horovod": ("fail", f"Build it on every host, for the same versions and the same MPI: {BUILD_COMMAND}"),
    "MPI": (
        "fail",
        "Put the same mpirun first on PATH on every host, or start with horovodrun --gloo.",
    ),
}


def check_software(report: Report) -> list[Finding]:
    """Check that versions and builds are equal on all hosts, and that everything loads."""
    findings = _python(report)
    findings += compare(
        report, "Python's path", lambda info: info["software"]["python"],
        "Install the environment at the same path on every host.", status="warn",
    )  # fmt: skip
    named = {name for _, info in report.responding for name in info["software"]["versions"]}
    for name, (status, remedy) in _VERSIONS.items():
        if name in named:
            findings += compare(report, name, partial(_version, name), remedy, status=status)
    findings += _frameworks(report)
    for name, title in TITLES.items():
        findings += _loads(report, name, title)
    return findings + _one_mpi(report) + _libraries(report)


def _version(name: str, info: HostInfo) -> str:
    return str(info["software"]["versions"].get(name, ""))


def _python(report: Report) -> list[Finding]:
    """Compare Python: a different minor version fails, a different patch release is a warning."""
    minors = {_version("Python", info).rpartition(".")[0] for _, info in report.responding}
    status: Status = "fail" if len(minors) > 1 else "warn"
    return compare(report, "Python", partial(_version, "Python"), _SAME, status=status)


def _frameworks(report: Report) -> list[Finding]:
    """Check that at least one framework is installed on some host."""
    without = [host.name for host, info in report.responding if not info["software"]["horovod"]]
    if len(without) < len(report.responding):
        return []
    remedy = f"pip install torch, or tensorflow, then {BUILD_COMMAND}"
    return [Finding(name, "framework", "fail", "no framework is installed", remedy) for name in without]


def _loads(report: Report, framework: str, title: str) -> list[Finding]:
    """Check that Horovod's extension was built for the installed framework and loads with it."""
    findings = []
    for host, info in report.responding:
        error = info["software"]["horovod"].get(framework)
        if error is None:
            continue
        check = f"Horovod for {title}"
        remedy = f"On that host: {BUILD_COMMAND} --force"
        findings.append(
            Finding(host.name, check, "fail", error, remedy)
            if error
            else Finding(host.name, check, "ok", "loads")
        )
    return findings


def _libraries(report: Report) -> list[Finding]:
    """Check that libraries that many tasks import can be imported, where they are installed."""
    findings = []
    for host, info in report.responding:
        found = info["software"].get("libraries", {})
        good = ", ".join(f"{name} {version}" for name, (version, error) in found.items() if not error)
        if good:
            findings.append(Finding(host.name, "optional libraries", "ok", good))
        for name, (version, error) in found.items():
            if error:
                text = f"{name} {version} cannot be imported: {error}"
                findings.append(Finding(host.name, "optional libraries", "warn", text, advice(name, error)))
    return findings


def _one_mpi(report: Report) -> list[Finding]:
    """Check that Horovod, mpi4py and mpirun use the same MPI, if there is any."""
    findings = []
    for host, info in report.responding:
        versions = dict(info["software"]["mpi"])
        error = versions.pop("mpi4py error")
        versions["mpirun"] = _version("MPI", info)
        known = {who: what.replace(" v", " ") for who, what in versions.items() if what and what != "MPI"}
        if error:
            status: Status = "warn"
            found, remedy = (
                f"mpi4py does not load: {error}",
                "pip install mpi4py, for the same MPI as Horovod.",
            )
        elif len(set(known.values())) > 1:
            status, found = "warn", ", ".join(f"{who} has {what}" for who, what in known.items())
            remedy = "Put the MPI that Horovod was built with first on PATH, or start with horovodrun --gloo."
        else:
            status, found, remedy = "ok", next(iter(known.values()), "none"), ""
        findings.append(Finding(host.name, "one MPI", status, found, remedy))
    return findings


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
