"""The installed Horovod, and whether it fits the job, without importing it."""

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.errors import EnvironmentFault, HorovodBuildError
from hvdtrain.horovod_build.patching import horovod_patches, patches_digest
from hvdtrain.host.frameworks import FRAMEWORKS

# The names, for people, of the frameworks that Horovod has an extension for.
TITLES = {flag: framework.title for flag, framework in FRAMEWORKS.items() if framework.horovod}
PIP_NAMES = {"torch": "torch", "tf": "tensorflow"}

# The first versions of the ranges in setup.cfg; older ones have other interfaces (Keras 2, C++14).
OLDEST = {"torch": "2.4", "tf": "2.18"}

# TensorFlow's package has several names, and no small file that contains its version.
_TENSORFLOW_PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tensorflow-cpu-aws"),
    *("intel-tensorflow", "tf-nightly", "tf-nightly-cpu"),
)


@dataclass(frozen=True)
class InstalledFramework:
    """An installed framework."""

    name: str  # "torch" or "tf"
    version: str  # as the framework itself reports it, e.g. "2.13.0+cpu"
    cuda: str = ""  # the CUDA version that it was built with; empty for a CPU build
    cxx11_abi: bool = True  # whether it was built with the newer ABI of the C++ library
    cxx_standard: int = 17  # the C++ standard that its headers require, e.g. 20; 0 if it has no headers
    folder: Path | None = field(default=None, compare=False)  # the folder of the package; None if unknown

    @property
    def title(self) -> str:
        """The name as it is displayed."""
        return TITLES[self.name]


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package without importing it, or None without the package."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module in sys.modules that has no spec
        return None
    if spec is None or spec.origin is None:  # without an origin it is only a leftover folder
        return None
    return Path(spec.origin).parent


def installed_framework(name: str) -> InstalledFramework | None:
    """Return the installed framework "torch" or "tf", or None if it is not installed."""
    if name == "torch":
        return _torch()
    if (folder := package_folder("tensorflow")) is None:
        return None
    version = next(filter(None, map(version_of, _TENSORFLOW_PACKAGES)), "")
    build_info = _text(folder / "python" / "platform" / "build_info.py")
    cuda = _first(r"'cuda_version', '([^']+)'", build_info)
    return InstalledFramework("tf", version, cuda=cuda, folder=folder) if version else None


def unsupported(found: InstalledFramework) -> tuple[str, str]:
    """Return why Horovod is not built for a framework, and what helps; both are empty if it can be."""
    oldest, pip_name = OLDEST[found.name], PIP_NAMES[found.name]
    release, least = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (found.version, oldest))
    if release < least:
        reason = f"{found.title} {found.version} is too old: hvdtrain needs {oldest} or newer."
        return reason, f"pip install --upgrade {pip_name}"
    if not found.cxx_standard:
        reason = f"{found.title} {found.version} in {found.folder} has no C++ headers (include/ATen/ATen.h)."
        return reason, f"pip install --force-reinstall --no-deps {pip_name}"
    return "", ""


def _torch() -> InstalledFramework | None:
    folder = package_folder("torch")
    if folder is None:
        return None
    # The package's metadata leaves out the "+cu130" that torch.__version__ has.
    version_file = _text(folder / "version.py")
    version = _first(r"__version__ = ['\"]([^'\"]+)", version_file)
    if not version:
        return None
    config = _text(folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake")
    # its headers end the compilation unless ``__cplusplus`` is at least a month of a year, e.g. 202002L
    headers = _text(folder / "include" / "ATen" / "ATen.h")
    standard = int(_first(r"__cplusplus < 20(\d\d)\d\dL", headers) or 17) if headers else 0
    return InstalledFramework(
        name="torch",
        version=version,
        cuda=_first(r"cuda(?:: [^=]+)? = ['\"]([^'\"]+)", version_file),
        cxx11_abi="_GLIBCXX_USE_CXX11_ABI=0" not in config,
        cxx_standard=standard,
        folder=folder,
    )


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; empty if there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""


BUILD_COMMAND = "python -m hvdtrain build-horovod"

# Name of the framework in metadata.json, and its extension without the suffix.
_IN_METADATA = {"torch": "pytorch", "tf": "tensorflow"}
_EXTENSIONS = {"torch": "torch/mpi_lib_v2", "tf": "tensorflow/mpi_lib"}


@dataclass(frozen=True)
class InstalledBuild:
    """The Horovod in the environment of the running Python."""

    version: str  # Horovod's version
    torch: str | None  # the PyTorch version it was built for; None if that extension is missing
    tensorflow: str | None  # the same for TensorFlow
    # the MPI that it was built with, e.g. "Open MPI 5.0.11"; None without MPI, or if the build does not
    # record it
    mpi: str | None
    gloo: bool  # whether it has the Gloo controller (False if the build does not record it)
    nccl: bool  # whether it reduces on GPUs with NCCL (False if the build does not record it)
    patches: str = ""  # digest of the patches that were applied; empty if hvdtrain did not build it
    key: str = ""  # identifies everything that the build depended on; empty if hvdtrain did not build it

    def describe(self) -> str:
        """Return one line with version, frameworks and controllers."""
        versions = (("torch", self.torch), ("TensorFlow", self.tensorflow))
        built_for = " and ".join(f"{title} {version}" for title, version in versions if version)
        built_for = built_for or "no framework"
        if not self.patches:
            return f"{self.version} for {built_for}; not built by hvdtrain"
        parts = [f"MPI ({self.mpi})"] if self.mpi else []
        parts += ["Gloo"] if self.gloo else []
        parts += ["NCCL"] if self.nccl else []
        return f"{self.version} for {built_for}; {', '.join(parts)}"

    def identify(self) -> str:
        """Return ``describe()`` and the digest of the patches: builds that differ in them may not agree."""
        return f"{self.describe()}; patches {self.patches}" if self.patches else self.describe()

    @property
    def command(self) -> str:
        """The command that builds Horovod again, for the same devices."""
        return BUILD_COMMAND + (" --gpu nccl" if self.nccl else "")

    def built_for(self, framework: str) -> str | None:
        """Return the version of "torch" or "tf" that it was built for, or None without that extension."""
        return self.torch if framework == "torch" else self.tensorflow


def installed_build() -> InstalledBuild | None:
    """Return the Horovod that is installed, or None, in milliseconds and without importing anything."""
    importlib.invalidate_caches()
    folder, version = package_folder("horovod"), version_of("horovod")
    if folder is None or not version:
        return None
    metadata: dict[str, Any] = {}
    record: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):  # it is damaged
        metadata = dict(json.loads((folder / "metadata.json").read_text(encoding="utf-8")))
        record = dict(metadata.get("hvdtrain", {}))
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    has = {name for name in TITLES if (folder / f"{_EXTENSIONS[name]}{suffix}").is_file()}
    built_for = {name: metadata.get(_IN_METADATA[name]) if name in has else None for name in TITLES}
    return InstalledBuild(
        version=version,
        torch=built_for["torch"],
        tensorflow=built_for["tf"],
        mpi=str(record.get("mpi", "MPI")) if metadata.get("have_mpi") else None,
        gloo=bool(metadata.get("have_gloo")),
        nccl=bool(metadata.get("have_nccl")),
        patches=str(record.get("patches") or ""),
        key=str(record.get("key", "")),
    )


def require_horovod(framework: str) -> InstalledBuild:
    """Raise an error with the command that helps unless Horovod is installed and fits the framework."""
    title = TITLES[framework]
    installed = installed_framework(framework)
    if installed is None:
        raise HorovodBuildError(
            f"{title} is not installed in this Python environment.",
            f"Install it, then build Horovod for it:\n"
            f"  pip install {PIP_NAMES[framework]}\n  {BUILD_COMMAND}",
        )
    if (build := installed_build()) is None:
        raise HorovodBuildError(
            f"Horovod is not installed in this Python environment ({title} {installed.version} is).",
            f"Build and install it (a few minutes, once):\n  {BUILD_COMMAND}",
        )
    whose = "" if build.patches else " It is not a build of hvdtrain."
    built_for = build.built_for(framework)
    if built_for is None:
        raise HorovodBuildError(
            f"The installed Horovod ({build.describe()}) has no extension for {title}.{whose}",
            f"Build it for everything that is installed:\n  {build.command}",
        )
    if built_for.replace("-", "") != installed.version.replace("-", ""):  # "2.22.0-rc0" is "2.22.0rc0"
        raise HorovodBuildError(
            f"The installed Horovod was built for {title} {built_for}, "
            f"but {title} {installed.version} is installed.{whose}",
            f"Build it again for what is installed:\n  {build.command}",
        )
    return build


def check_patches(build: InstalledBuild, *, elastic: bool) -> str:
    """Return what to report of a build of hvdtrain that has other patches."""
    # elastic jobs, which start Horovod again and again in one process, are refused with it
    own = patches_digest(horovod_patches())
    if build.patches in ("", own):
        return ""
    found = f"built with patches {build.patches}, and this hvdtrain has patches {own}"
    if elastic:
        raise HorovodBuildError(
            f"The installed Horovod was {found}. In an elastic job its workers may crash.",
            f"Build it with the patches of this hvdtrain:\n  {build.command}",
        )
    return f"the installed Horovod was {found}; build it again: {build.command}"


def horovodrun_path() -> str:
    """Return the path of horovodrun: that of this Python, or the one on PATH."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    if (found := shutil.which("horovodrun", path=os.pathsep.join(folders))) is None:
        raise EnvironmentFault("there is no horovodrun", f"Run: {BUILD_COMMAND}")
    return found
