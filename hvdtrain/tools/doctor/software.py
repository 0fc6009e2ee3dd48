"""What is installed on a host: read from files if possible, otherwise by loading it in a child process."""

import json
import os
import platform
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.installed import (
    TITLES,
    installed_build,
    installed_framework,
    package_folder,
    require_horovod,
)
from hvdtrain.host.processes import run_limited

_PREFIX = "hvdtrain-probe:"
_PROGRAM_SECONDS = 15
_PACKAGES = {"Keras": "keras", "NumPy": "numpy", "mpi4py": "mpi4py"}
# Each one sets `info`, which is printed after the prefix; what the framework itself prints is ignored.
_CODE = {
    "torch": """
import json, torch, horovod.torch
info = {"version": torch.__version__}
if torch.cuda.is_available():
    count = torch.cuda.device_count()
    info["gpus"] = {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
""",
    "tf": """
import json, tensorflow, horovod.tensorflow
info = {"version": tensorflow.__version__}
gpus = tensorflow.config.list_physical_devices("GPU")
if gpus:
    info["gpus"] = {"gpus": [gpu.name for gpu in gpus]}
""",
    "mpi4py": """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
info = {"version": MPI.Get_library_version().split(",")[0].strip()}
""",
}
# With the launcher's variables, the probe would join the launcher's job.
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HOROVOD_", "SLURM_")


def _run_probe(code: str, seconds: float) -> dict[str, Any]:
    """Return what code that imports json sets ``info`` to, in a child process; if it fails, its ``error``."""
    code = f"{code}\nprint({_PREFIX!r} + json.dumps(info), flush=True)"
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER_PREFIXES)}
    environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        done = run_limited([sys.executable, "-c", code], seconds, environ)
    except OSError as error:
        return {"error": f"{sys.executable} cannot be started: {error.strerror}"}
    if done.code is None:
        return {"error": f"loading it took longer than {seconds:.0f} s"}
    for line in done.output.splitlines():
        if line.startswith(_PREFIX):
            info: dict[str, Any] = json.loads(line.removeprefix(_PREFIX))
            return info
    if done.code < 0:
        return {"error": f"loading it ended with {signal.Signals(-done.code).name}"}
    lines = [line.strip() for line in done.errors.splitlines() if line.strip()]
    return {"error": lines[-1][:300] if lines else f"loading it ended with exit code {done.code}"}


def software_info(frameworks: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Return what is installed, and whether it loads, each framework within some seconds."""
    build = installed_build()
    installed = {name: found for name in frameworks if (found := installed_framework(name))}
    names = [*installed, *(["mpi4py"] if package_folder("mpi4py") else [])]
    with ThreadPoolExecutor(4) as pool:
        mpirun = pool.submit(_mpirun)
        probed = dict(zip(names, pool.map(lambda name: _probe(name, seconds), names), strict=True))
    mpi4py = probed.pop("mpi4py", {})
    packages = {title: name for title, name in _PACKAGES.items() if title != "Keras" or "tf" in frameworks}
    return {
        "versions": {
            "Python": platform.python_version(),
            "hvdtrain": f"{hvdtrain.__version__}, files {_digest(Path(hvdtrain.__file__).parent)}",
            **{TITLES[name]: installed[name].version if name in installed else "" for name in frameworks},
            **{title: _package_version(name) for title, name in packages.items()},
            "Horovod": build.identify() if build else "",
            "MPI": mpirun.result(),
        },
        "python": sys.executable,
        "build_key": build.key if build else "",
        "nccl_build": bool(build and build.nccl),
        "horovod": {name: found.get("error", "") for name, found in probed.items()},
        "mpi": {
            "Horovod": (build.mpi or "") if build else "",
            "mpi4py": mpi4py.get("version", ""),
            "mpi4py error": mpi4py.get("error", ""),
        },
        "gpus": {name: gpus for name, found in probed.items() if (gpus := found.get("gpus"))},
    }


def _probe(name: str, seconds: float) -> dict[str, Any]:
    """Load a framework with Horovod's extension for it, or mpi4py; return what it reports."""
    try:
        if name in TITLES:
            require_horovod(name)
    except HorovodBuildError as error:
        return {"error": error.problem}
    return _run_probe(_CODE[name], seconds)


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
