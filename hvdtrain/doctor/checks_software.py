"""Checks of what is installed."""

from functools import partial

from hvdtrain.doctor.case import Case, compare
from hvdtrain.doctor.findings import Facts, Finding, Verdict
from hvdtrain.horovod_build.frameworks import TITLES
from hvdtrain.horovod_build.installed import BUILD_COMMAND

_SAME = "Install the same version on every host; images or a shared environment keep them equal."
# version by name: verdict where it differs, remedy
_VERSIONS: dict[str, tuple[Verdict, str]] = {
    "hvdtrain": ("fail", "Install the same hvdtrain, of the same source, on every host."),
    "PyTorch": ("fail", f"{_SAME} Then build Horovod there: {BUILD_COMMAND}"),
    "TensorFlow": ("fail", f"{_SAME} Then build Horovod there: {BUILD_COMMAND}"),
    "Keras": ("fail", _SAME),
    "NumPy": ("warn", _SAME),
    "mpi4py": ("warn", _SAME),
    "Horovod": ("fail", f"Build it on every host for the same versions and MPI: {BUILD_COMMAND}"),
    "MPI": (
        "fail",
        "Let the same mpirun be the first on PATH on every host; or start with horovodrun --gloo.",
    ),
}


def check_software(case: Case) -> list[Finding]:
    """Check that versions and builds are equal everywhere, and that everything loads."""
    findings = _python(case)
    findings += compare(
        case, "Python's path", lambda facts: facts["software"]["python"],
        "Install the environment at the same path on every host.", verdict="warn",
    )  # fmt: skip
    named = {name for _, facts in case.heard for name in facts["software"]["versions"]}
    for name, (verdict, remedy) in _VERSIONS.items():
        if name in named:
            findings += compare(case, name, partial(_version, name), remedy, verdict=verdict)
    findings += _frameworks(case)
    for name, title in TITLES.items():
        findings += _loads(case, name, title)
    return findings + _one_mpi(case)


def _version(name: str, facts: Facts) -> str:
    return str(facts["software"]["versions"].get(name, ""))


def _python(case: Case) -> list[Finding]:
    """Another minor version fails, another patch release is worth a word."""
    minors = {_version("Python", facts).rpartition(".")[0] for _, facts in case.heard}
    verdict: Verdict = "fail" if len(minors) > 1 else "warn"
    return compare(case, "Python", partial(_version, "Python"), _SAME, verdict=verdict)


def _frameworks(case: Case) -> list[Finding]:
    """At least one framework must be there."""
    none = [host.name for host, facts in case.heard if not facts["software"]["horovod"]]
    if len(none) < len(case.heard):
        return []
    remedy = f"pip install torch, or tensorflow, then {BUILD_COMMAND}"
    return [Finding(name, "framework", "fail", "no framework is installed", remedy) for name in none]


def _loads(case: Case, framework: str, title: str) -> list[Finding]:
    """Horovod's extension must fit the framework and load with it."""
    findings = []
    for host, facts in case.heard:
        error = facts["software"]["horovod"].get(framework)
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


def _one_mpi(case: Case) -> list[Finding]:
    """Horovod, mpi4py and mpirun must be of one MPI, where there is any."""
    findings = []
    for host, facts in case.heard:
        have = dict(facts["software"]["mpi"])
        error = have.pop("mpi4py error")
        have["mpirun"] = _version("MPI", facts)
        known = {who: what.replace(" v", " ") for who, what in have.items() if what and what != "MPI"}
        if error:
            verdict: Verdict = "warn"
            found, remedy = f"mpi4py does not load: {error}", "pip install mpi4py, beside the MPI of Horovod."
        elif len(set(known.values())) > 1:
            verdict, found = "warn", ", ".join(f"{who} has {what}" for who, what in known.items())
            remedy = "Put the MPI of Horovod first on PATH, or start with horovodrun --gloo."
        else:
            verdict, found, remedy = "ok", next(iter(known.values()), "none"), ""
        findings.append(Finding(host.name, "one MPI", verdict, found, remedy))
    return findings
