"""All checks: software, names, interfaces, ports, clocks, directories, disks, memory, cores and GPUs."""

import ipaddress
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from hvdtrain.horovod_build.installed import BUILD_COMMAND, TITLES
from hvdtrain.storage.text import counted
from hvdtrain.tools.doctor.report import (
    Diagnosis,
    Finding,
    Host,
    HostInfo,
    Report,
    Status,
    Verdict,
    compare,
    summarize_names,
)

_CLOCK_SECONDS = 1.0
_AHEAD_SECONDS = 25.0  # horovodrun gives workers 30 seconds to start, by the clock of its own host
_NO_ADDRESS = "no address to try"
_BLOCKED = (
    "Let the hosts of the job connect to each other on all TCP ports (ip_local_port_range at least): a "
    "firewall on that host or between them blocks it."
)


def diagnose(report: Report, transport: str) -> Diagnosis:
    """Run all checks on a report that a transport of this title carried."""
    findings = [host.problem for host in report.hosts if host.problem]
    if report.responding:
        findings += check_software(report) + report.each("own name", _own_name)
        if len(report.responding) > 1:
            findings += _interfaces(report) + _ports(report) + _clocks(report)
        findings += check_machines(report)
    return Diagnosis(report, transport, tuple(findings))


def add_horovod_result(diagnosis: Diagnosis, result: Mapping[str, Any], host_of: list[str]) -> Diagnosis:
    """Return the diagnosis with what ``start_horovod`` returned; ``host_of`` has the host of each rank."""
    errors: dict[str, str] = {}
    for rank, error in enumerate(result.get("errors", [])):
        if error:
            errors.setdefault(host_of[rank], f"rank {rank}: {error}")
    remedy = "Start the doctor again with HOROVOD_LOG_LEVEL=debug to see what Horovod waits for."
    good = ("ok", "" if errors else f"over {result['controller']}", "")
    findings = [
        Finding(name, "Horovod starts", *(("fail", errors[name], remedy) if name in errors else good))
        for name in (host.name for host in diagnosis.report.hosts)
    ]
    return replace(diagnosis, findings=(*diagnosis.findings, *findings), horovod=result)


def _own_name(_: Host, info: HostInfo) -> Verdict:
    name, addresses = info["hostname"], info["addresses"]
    known = {one for one in addresses if one in info["own_addresses"] or one.startswith("127.")}
    foreign = ", ".join(one for one in addresses if one not in known)
    remedy = f"Add its address and {name} to its /etc/hosts, or to DNS. Otherwise Gloo crashes."
    if not addresses:
        return "fail", f"its own name, {name}, does not resolve there", remedy
    if foreign:
        found = f"its own name, {name}, resolves to {foreign}, which is not an address of it"
        return "fail", found, remedy
    return "ok", "resolves", ""


def _links(report: Report) -> list[tuple[int, int, str, dict[str, Any]]]:
    """Return all tried connections: index of the source and of the target host, interface, result."""
    return [
        (source, target, name, link)
        for source in range(len(report.hosts))
        for target, agent in enumerate(report.agents)
        for name, link in ((report.answer("links", source) or {}).get(str(agent)) or {}).items()
    ]


def _interfaces(report: Report) -> list[Finding]:
    """Check that one interface name exists on all hosts: Horovod and Open MPI take interfaces by name."""
    counts = Counter(name for _, info in report.responding for name in info["interfaces"])
    common = sorted(name for name, number in counts.items() if number == len(report.responding))
    if common:
        broken = {name for *_, name, link in _links(report) if link["error"]}
        chosen = min(common, key=lambda name: name in broken)  # one that connects all hosts, if there is any
        hint = f" (--network-interfaces {chosen})" if len(counts) > 1 else ""
        texts_of = [info["interfaces"][chosen] for _, info in report.responding]
        networks = {
            ", ".join(sorted({str(ipaddress.IPv4Interface(text).network) for text in texts}))
            for texts in texts_of
        }
        # hosts in several networks are connected by routers, which the check of the ports tests
        network = f" {networks.pop()}" if len(networks) == 1 else ""
        return report.each("interface", lambda *_: ("ok", f"{chosen}{hint}{network}", ""))
    expected = max(counts, key=counts.__getitem__, default="")  # of equal counts, that of the first host
    owners = [host.name for host, info in report.responding if expected in info["interfaces"]]
    who_has = "the others have" if len(owners) > 1 else f"{owners[0]} has" if owners else ""

    def judge(_: Host, info: HostInfo) -> Verdict:
        names = list(info["interfaces"])
        if expected in names:
            return "ok", expected, ""
        if not names:
            remedy = "Bring its network interface up, with an address."
            return "fail", "it has no interface that leads to other hosts", remedy
        remedy = (
            "Give the interface that leads to the other hosts the same name on all of them "
            f"(ip link set dev {names[0]} name {expected}, or an altname of udev)."
        )
        return "fail", f"it has {', '.join(names)}, but not {expected}, which {who_has}", remedy

    return report.each("interface", judge)


def _ports(report: Report) -> list[Finding]:
    """Check that every host reaches every other on unprivileged ports, by at least one interface."""
    tried: dict[tuple[int, int], str] = {}  # the error of the best interface, by source and target
    for source, target, _, link in _links(report):
        tried[source, target] = link["error"] if tried.get((source, target), "x") else ""
    responding = [index for index, host in enumerate(report.hosts) if host.info is not None]
    pairs = [(a, b) for a in responding for b in responding if a != b]
    errors = {pair: error for pair in pairs if (error := tried.get(pair, _NO_ADDRESS))}
    failed_in = Counter(b for (_, b), error in errors.items() if error != _NO_ADDRESS)
    findings = []
    for index in responding:
        name = report.hosts[index].name
        incoming = {a: error for (a, b), error in errors.items() if b == index}
        outgoing = [error for (a, _), error in errors.items() if a == index]
        most_of_others = max((failed_in[other] for other in responding if other != index), default=0)
        # Of the two ends of a broken link, name the host with more of them; of two hosts, the target.
        if incoming and len(incoming) >= max(1, most_of_others):
            sources = summarize_names([report.hosts[a].name for a in incoming])
            reasons = ", ".join(sorted(set(incoming.values())))
            found = f"connections to its unprivileged ports fail ({reasons}) from {sources}"
        elif len(outgoing) == len(responding) - 1 and len(responding) > 2:
            reasons = ", ".join(sorted(set(outgoing)))
            found = f"it cannot connect to unprivileged ports of any other host ({reasons})"
        else:
            findings.append(Finding(name, "ports", "ok", "reachable"))
            continue
        findings.append(Finding(name, "ports", "fail", found, _BLOCKED))
    return findings


def _clocks(report: Report) -> list[Finding]:
    """Compare the clocks with that of the first host, by the fastest round trip."""
    first = next(index for index, host in enumerate(report.hosts) if host.info is not None)
    offsets: dict[int, tuple[float, float]] = {first: (0.0, 0.0)}  # round trip, seconds ahead
    for source, target, _, link in _links(report):
        if first in (source, target) and not link["error"]:
            other, sign = (target, 1) if source == first else (source, -1)
            offset = (link["trip"], sign * link["clock"])
            offsets[other] = min(offsets.get(other, offset), offset)
    findings = []
    for index, (uncertainty, seconds) in sorted(offsets.items()):
        name = report.hosts[index].name
        if abs(seconds) - uncertainty <= _CLOCK_SECONDS:
            findings.append(Finding(name, "clock", "ok", f"within {_CLOCK_SECONDS:.0f} s"))
            continue
        found = f"{abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'} {report.hosts[first].name}"
        remedy = "Set its clock by NTP (timedatectl set-ntp true): times in files and logs are wrong."
        is_ahead = seconds - uncertainty > _AHEAD_SECONDS
        found += ": horovodrun's --start-timeout expires there at once" if is_ahead else ""
        findings.append(Finding(name, "clock", "fail" if is_ahead else "warn", found, remedy))
    return findings


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
    expected, free = report.directory, "Free some space there, or set TMPDIR to another folder."

    def directory(_: Host, info: HostInfo) -> Verdict:
        if info["directory"] == expected:
            return "ok", expected, ""
        remedy = "Create it there, with the same files: workers read configs and tasks from it."
        return "fail", f"it is {info['directory'] or 'deleted'}; {expected} is missing there", remedy

    def cores(host: Host, info: HostInfo) -> Verdict:
        if host.slots <= info["cores"]:
            return "ok", f"{host.slots} of {info['cores']}", ""
        found = f"{host.slots} workers on {counted(info['cores'], 'core')}: they take turns"
        return "warn", found, "Training works but is slow. Give the host fewer slots."

    return [
        *report.each("working directory", directory),
        *_shared(report),
        *report.each("run directory's disk", partial(_run_disk, first)),
        *report.each("temporary directory", lambda _, info: _disk(info, "temporary directory", "fail", free)),
        *report.each("/dev/shm", partial(_shared_memory, first)),
        *report.each("cores", cores),
        *_gpus(report),
    ]


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


# in MiB, what a disk has to have free, or a job fails, and what it should have
_FREE = {"run directory": (64, 1024), "temporary directory": (8, 256)}


def _disk(info: HostInfo, name: str, fail: Status, remedy: str, who: str = "") -> Verdict:
    disk, (fail_mib, warn_mib) = info["disks"][name], _FREE[name]
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
    return _disk(info, "run directory", status, remedy, who)


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


def _gpus(report: Report) -> list[Finding]:
    cards_of = {host.name: info["gpus"]["cards"] for host, info in report.responding}
    if not any(cards_of[host.name] or info["gpus"]["error"] for host, info in report.responding):
        return report.each("GPUs", lambda *_: ("ok", "no GPU", ""))
    most = max(map(len, cards_of.values()))
    equipped = summarize_names([name for name, cards in cards_of.items() if len(cards) == most])

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
