"""What is installed on a host: read from files where that is possible, loaded in probes where not."""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.doctor.probes import probe
from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.frameworks import TITLES, installed_framework, package_folder
from hvdtrain.horovod_build.installed import installed_build, require_horovod

_PROGRAM_SECONDS = 15
_PACKAGES = {"Keras": "keras", "NumPy": "numpy", "mpi4py": "mpi4py"}


def software_facts(frameworks: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Give what is installed, and what of it loads.

    Args:
        frameworks: those to look at, of "torch" and "tf".
        seconds: time that loading one may take.

    Returns:
        ``versions``, what must be equal on all hosts: text by name, empty where it is missing;
        ``horovod``, per installed framework why Horovod does not fit or load, empty where it does;
        ``gpus``, what frameworks say of GPUs; ``mpi``, what Horovod, mpi4py and mpirun each have.
    """
    build = installed_build()
    installed = {name: found for name in frameworks if (found := installed_framework(name))}
    names = [*installed, *(["mpi4py"] if package_folder("mpi4py") else [])]
    misfits = {name: problem for name in installed if (problem := _misfit(name))}
    with ThreadPoolExecutor(4) as pool:
        mpirun = pool.submit(_mpirun)
        probed = dict(zip(names, pool.map(lambda n: _probe_unless(misfits, n, seconds), names), strict=True))
    return {
        "versions": {
            "Python": platform.python_version(),
            "hvdtrain": f"{hvdtrain.__version__}, files {_digest(Path(hvdtrain.__file__).parent)}",
            **{TITLES[name]: installed[name].version if name in installed else "" for name in frameworks},
            **{title: _version(name) for title, name in _PACKAGES.items() if _concerns(title, frameworks)},
            "Horovod": build.describe() if build else "",
            "MPI": mpirun.result(),
        },
        "python": sys.executable,
        "build_key": build.key if build else "",
        "nccl_build": bool(build and build.nccl),
        "horovod": {name: probed[name].get("error", "") for name in installed},
        "mpi": {
            "Horovod": (build.mpi or "") if build else "",
            "mpi4py": probed.get("mpi4py", {}).get("version", ""),
            "mpi4py error": probed.get("mpi4py", {}).get("error", ""),
        },
        "gpus": {name: facts for name in installed if (facts := _of_gpus(probed[name]))},
    }


def _concerns(title: str, frameworks: tuple[str, ...]) -> bool:
    return title != "Keras" or "tf" in frameworks


def _misfit(framework: str) -> str:
    try:
        require_horovod(framework)
    except HorovodBuildError as error:
        return error.problem
    return ""


def _probe_unless(misfits: dict[str, str], name: str, seconds: float) -> dict[str, Any]:
    return {"error": misfits[name]} if name in misfits else probe(name, seconds)


def _of_gpus(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: facts[name] for name in ("gpus", "nccl", "no_peer_access") if name in facts}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _mpirun() -> str:
    """Give the name and version of the mpirun on PATH."""
    program = shutil.which("mpirun")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_PROGRAM_SECONDS,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} does not run: {getattr(error, 'strerror', None) or 'it took too long'}"
    first = (done.stdout or done.stderr).strip().partition("\n")[0]
    if done.returncode:
        return f"{program} does not run: {first[:100]}"
    return first.removeprefix("mpirun ").replace("(", "").replace(")", "")


def _digest(folder: Path) -> str:
    """Give a digest of the package's source: two checkouts may have one version number."""
    digest = blake2b(digest_size=4)
    for path in sorted(folder.rglob("*.py")):
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
