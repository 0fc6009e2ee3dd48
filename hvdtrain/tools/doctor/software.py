"""What is installed on a host: read from files if possible, otherwise by loading it in a child process."""

import os
import platform
import shutil
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
from hvdtrain.host.processes import run_limited

_PROGRAM_SECONDS = 15
_PACKAGES = {"Keras": "keras", "NumPy": "numpy", "mpi4py": "mpi4py"}


def software_info(frameworks: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Return what is installed, and whether it loads.

    Args:
        frameworks: those to look at, of "torch" and "tf".
        seconds: how long loading one may take.

    Returns:
        ``versions``: texts that must be equal on all hosts, by name; empty if it is not installed.
        ``horovod``: for each installed framework, why Horovod was not built for it or does not load;
        empty if it loads.
        ``gpus``: for each installed framework, the GPUs that it sees.
        ``mpi``: the MPI of Horovod and of mpi4py, and why mpi4py does not load.
    """
    build = installed_build()
    installed = {name: found for name in frameworks if (found := installed_framework(name))}
    names = [*installed, *(["mpi4py"] if package_folder("mpi4py") else [])]
    build_errors = {name: problem for name in installed if (problem := _build_error(name))}
    with ThreadPoolExecutor(4) as pool:
        mpirun = pool.submit(_mpirun)
        probed = dict(
            zip(names, pool.map(lambda n: _probe_unless(build_errors, n, seconds), names), strict=True)
        )
    return {
        "versions": {
            "Python": platform.python_version(),
            "hvdtrain": f"{hvdtrain.__version__}, files {_digest(Path(hvdtrain.__file__).parent)}",
            **{TITLES[name]: installed[name].version if name in installed else "" for name in frameworks},
            **{
                title: _package_version(name)
                for title, name in _PACKAGES.items()
                if _belongs_to(title, frameworks)
            },
            "Horovod": build.identify() if build else "",
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
        "gpus": {name: info for name in installed if (info := _gpu_info(probed[name]))},
    }


def _belongs_to(title: str, frameworks: tuple[str, ...]) -> bool:
    return title != "Keras" or "tf" in frameworks


def _build_error(framework: str) -> str:
    try:
        require_horovod(framework)
    except HorovodBuildError as error:
        return error.problem
    return ""


def _probe_unless(build_errors: dict[str, str], name: str, seconds: float) -> dict[str, Any]:
    return {"error": build_errors[name]} if name in build_errors else probe(name, seconds)


def _gpu_info(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in ("gpus", "nccl", "no_peer_access") if name in info}


def _package_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _mpirun() -> str:
    """Return the name and version of the mpirun on PATH."""
    program = shutil.which("mpirun")
    if program is None:
        return ""
    try:
        done = run_limited([program, "--version"], _PROGRAM_SECONDS)
    except OSError as error:
        return f"{program} does not run: {error.strerror}"
    first = (done.output or done.errors).strip().partition("\n")[0]
    if done.code != 0:
        return f"{program} does not run: {'it took too long' if done.code is None else first[:100]}"
    return first.removeprefix("mpirun ").replace("(", "").replace(")", "")


def _digest(folder: Path) -> str:
    """Return a digest of the package's source: different checkouts may have the same version number."""
    digest = blake2b(digest_size=4)
    for path in sorted(folder.rglob("*.py")):
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
