"""Checks of software, directories, disks, memory, cores and GPUs."""

from functools import partial
from itertools import chain
from typing import Any

from hvdtrain.horovod_build.installed import BUILD_COMMAND, TITLES
from hvdtrain.storage.text import counted
from hvdtrain.tools.doctor.report import Finding, Host, HostInfo, Report, Status, Verdict, compare
from hvdtrain.tools.doctor.report import summarize_names as named

_SAME = "Install the same version on every host; an image or a shared environment keeps them equal."
_BUILD = f"{_SAME} Then build Horovod there: {BUILD_COMMAND}"
# by name: the status of a host whose version differs, and the remedy
_VERSIONS: dict[str, tuple[Status, str]] = {
    "hvdtrain": ("fail", "Install the same version of hvdtrain, from the same source, on every host."),
    "PyTorch": ("fail", _BUILD),
    "TensorFlow": ("fail", _BUILD),
    "Keras": ("fail", _SAME),
    "NumPy": ("warn", _SAME),
    "mpi4py": ("warn", _SAME),
    "Horovod": ("fail", f"Build it on every host, for the same versions and the same MPI: {BUILD_COMMAND}"),
    "MPI": ("fail", "Put the same mpirun first on PATH on every host, or start with horovodrun --gloo."),
}


def check_software(report: Report) -> list[Finding]:
    """Check that versions and builds are equal on all hosts, and that everything loads."""
    infos = [info["software"] for _, info in report.responding]
    minors = {info["versions"].get("Python", "").rpartition(".")[0] for info in infos}
    status: Status = "fail" if len(minors) > 1 else "warn"
    findings = compare(report, "Python", partial(_version, "Python"), _SAME, status)
    same_path = "Install the environment at the same path on every host."
    findings += compare(report, "Python's path", lambda info: info["software"]["python"], same_path, "warn")
    named = set(chain.from_iterable(info["versions"] for info in infos))
    for name, (status, remedy) in _VERSIONS.items():
        if name in named:
            findings += compare(report, name, partial(_version, name), remedy, status)
    if not any(info["horovod"] for info in infos):
        remedy = f"pip install torch, or tensorflow, then {BUILD_COMMAND}"
        findings += report.each("framework", lambda *_: ("fail", "no framework is installed", remedy))
    for name, title in TITLES.items():
        for host, info in report.responding:
            if (error := info["software"]["horovod"].get(name)) is not None:
                bad: Verdict = ("fail", error, f"On that host: {BUILD_COMMAND} --force")
                verdict = bad if error else ("ok", "loads", "")
                findings.append(Finding(host.name, f"Horovod for {title}", *verdict))
    return findings + report.each("one MPI", _one_mpi)


def _version(name: str, info: HostInfo) -> str:
    return str(info["software"]["versions"].get(name, ""))


def _one_mpi(_: Host, info: HostInfo) -> Verdict:
    """Check that Horovod, mpi4py and mpirun use the same MPI, if there is any."""
    versions = {**info["software"]["mpi"], "mpirun": _version("MPI", info)}
    if error := versions.pop("mpi4py error"):
        return "warn", f"mpi4py does not load: {error}", "pip install mpi4py, for the same MPI as Horovod."
    known = {who: what.replace(" v", " ") for who, what in versions.items() if what and what != "MPI"}
    if len(set(known.values())) <= 1:
        return "ok", next(iter(known.values()), "none"), ""
    remedy = "Put the MPI that Horovod was built with first on PATH, or start with horovodrun --gloo."
    return "warn", ", ".join(f"{who} has {what}" for who, what in known.items()), remedy


_SHARED_MEMORY_MIB = 16  # what Open MPI uses for each worker


def check_machines(report: Report) -> list[Finding]:
    """Check the directories, disks, memory, cores and GPUs of all hosts."""
    first = report.hosts[0].name if report.hosts else ""
    findings = report.each("working directory", partial(_directory, report.directory))
    findings += _shared(report)
    findings += report.each("run directory's disk", partial(_run_disk, first))
    findings += report.each("temporary directory", _temporary_disk)
    findings += report.each("/dev/shm", partial(_shared_memory, first))
    return findings + report.each("cores", _cores) + _gpus(report)


def _directory(expected: str, _: Host, info: HostInfo) -> Verdict:
    if info["directory"] == expected:
        return "ok", expected, ""
    remedy = "Create it there, with the same files: workers read configs and tasks from it."
    return "fail", f"it is {info['directory'] or 'deleted'}; {expected} is missing there", remedy


def _shared(report: Report) -> list[Finding]:
    """Check whether all hosts see the run directory of the first host."""
    if len(report.responding) < 2 or not any(report.answers.get("marker") or []):
        return []
    first = report.hosts[0].name
    seen = {host.name: report.answer("marker seen", index) for index, host in enumerate(report.hosts)}
    remedy = (
        "A job runs, since only rank 0's host writes and reads it. But --resume needs rank 0 on the same "
        "host again. Otherwise put it on a shared file system (--run-dir)."
    )

    def judge(host: Host, info: HostInfo) -> Verdict:
        if seen[host.name]:
            return "ok", "shared", ""
        path = info["disks"]["run directory"]["path"]
        return "warn", f"{path} is not the same as on {first}: it is not shared", remedy

    return report.each("run directory", judge)


def _disk(disk: dict[str, Any], limits: tuple[int, int], fail: Status, remedy: str, who: str = "") -> Verdict:
    fail_mib, warn_mib = limits
    if disk["error"]:
        return fail, f"nothing can be written to {disk['path']}: {disk['error']}{who}", remedy
    if disk["free_mib"] >= warn_mib:
        return "ok", f"more than {_size(warn_mib)} free", ""
    status = fail if disk["free_mib"] < fail_mib else "warn"
    return status, f"{_size(disk['free_mib'])} free in {disk['path']}{who}", remedy


def _run_disk(first: str, host: Host, info: HostInfo) -> Verdict:
    status: Status = "fail" if host.name == first else "warn"
    who = "" if host.name == first else " (only rank 0 writes there)"
    remedy = "Free some space or fix its permissions, or see --run-dir and --keep-last."
    return _disk(info["disks"]["run directory"], (64, 1024), status, remedy, who)


def _temporary_disk(_: Host, info: HostInfo) -> Verdict:
    remedy = "Free some space there, or set TMPDIR to another folder."
    return _disk(info["disks"]["temporary directory"], (8, 256), "fail", remedy)


def _shared_memory(first: str, host: Host, info: HostInfo) -> Verdict:
    """Horovodrun needs it on its own host, and NCCL on all hosts. Open MPI falls back to TCP, slowly."""
    disk, is_first = info["disks"]["/dev/shm"], host.name == first
    enlarged = "mount -o remount,size=1g /dev/shm; docker run --shm-size=1g"
    remedy = f"Remove old files there, or enlarge it: {enlarged}."
    if disk["error"]:
        status: Status = "fail" if is_first or info["gpus"]["cards"] else "warn"
        who = " (so horovodrun cannot start jobs from this host)" if is_first else ""
        return status, f"nothing can be written to it: {disk['error']}{who}", remedy
    if host.slots > 1 and disk["free_mib"] < _SHARED_MEMORY_MIB * host.slots:
        return "warn", f"{_size(disk['free_mib'])} free for {host.slots} workers", remedy
    return "ok", "enough free", ""


def _cores(host: Host, info: HostInfo) -> Verdict:
    if host.slots <= info["cores"]:
        return "ok", f"{host.slots} of {info['cores']}", ""
    found = f"{host.slots} workers on {counted(info['cores'], 'core')}: they take turns"
    return "warn", found, "Training works but is slow. Give the host fewer slots."


def _gpus(report: Report) -> list[Finding]:
    cards_of = {host.name: info["gpus"]["cards"] for host, info in report.responding}
    if not any(cards_of[host.name] or info["gpus"]["error"] for host, info in report.responding):
        return report.each("GPUs", lambda *_: ("ok", "no GPU", ""))
    most = max(map(len, cards_of.values()))
    equipped = named([name for name, cards in cards_of.items() if len(cards) == most])

    def judge(host: Host, info: HostInfo) -> Verdict:
        cards = info["gpus"]["cards"]
        if error := info["gpus"]["error"]:
            return "fail", f"nvidia-smi: {error}", "Repair the driver there."
        if not cards:
            remedy = "Leave this host out, or train on CPUs on all hosts (--device cpu)."
            return "fail", f"no GPU; {most} on {equipped}", remedy
        if host.slots > len(cards):
            remedy = "Each worker needs a GPU of its own: give the host fewer slots."
            return "fail", f"{host.slots} workers for {len(cards)} GPUs", remedy
        kinds = sorted({f"{card['name']}, {int(card['memory_mib']) // 1024} GiB" for card in cards})
        return "ok", f"{len(cards)} x {' and '.join(kinds)}", ""

    return report.each("GPUs", judge) + _gpu_software(report)


def _gpu_software(report: Report) -> list[Finding]:
    """Check driver and NCCL on hosts with GPUs."""
    findings = compare(
        report, "GPU driver", lambda info: ", ".join(sorted({c["driver"] for c in info["gpus"]["cards"]})),
        "Install the same driver on every host.", "warn", missing="none",
    )  # fmt: skip
    findings += compare(
        report, "NCCL", lambda info: info["software"]["gpus"].get("torch", {}).get("nccl", ""),
        "Install the same PyTorch, with the same NCCL, on every host.", "warn", missing="none",
    )  # fmt: skip
    for host, info in report.responding:
        if not (number := len(info["gpus"]["cards"])):
            continue
        software = info["software"]
        if not software["nccl_build"]:
            remedy = "python -m hvdtrain build-horovod --gpu nccl; or train on CPUs (--device cpu)."
            found = "Horovod was built without NCCL"
            findings.append(Finding(host.name, "Horovod on GPUs", "fail", found, remedy))
        for name, seen in software["gpus"].items():
            if (visible := len(seen.get("gpus", []))) < number:
                found = f"{name} sees {visible} of {number} GPUs"
                findings.append(Finding(host.name, "GPUs", "warn", found, "See CUDA_VISIBLE_DEVICES there."))
    return findings


def _size(mib: int) -> str:
    return f"{mib / 1024:.0f} GiB" if mib >= 1024 else f"{mib} MiB"
