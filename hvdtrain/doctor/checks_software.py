"""Checks of what is installed."""

from functools import partial

from hvdtrain.doctor.libraries import advice
from hvdtrain.horovod_build.frameworks import TITLES
from hvdtrain.horovod_build.installed import BUILD_COMMAND
from hvdtrain.tools.doctor.report import Finding, HostInfo, Report, Status, compare

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
