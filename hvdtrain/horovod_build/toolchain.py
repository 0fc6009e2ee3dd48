"""What a build needs from the machine: compilers, CMake, CUDA and NCCL."""

import importlib.util
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HorovodBuildError
from hvdtrain.host.processes import run_limited


def scripts_folder() -> Path:
    """Return the folder of the environment's programs, which need not be on PATH."""
    return Path(sysconfig.get_path("scripts"))


def packages_folder() -> Path:
    """Return the folder into which pip installs packages with compiled parts."""
    return Path(sysconfig.get_path("platlib"))


def path_with(*first: Path) -> str:
    """Return PATH with folders in front: those given, then the folder of the environment's programs."""
    folders = [str(folder) for folder in (*first, scripts_folder())]
    return os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])


def output_of(*command: str) -> str | None:
    """Return the output of a command, both streams, or None if it is missing, fails or takes a minute."""
    try:
        done = run_limited(command, 60)
    except OSError:
        return None
    return done.output + done.errors if done.code == 0 else None


@dataclass(frozen=True)
class Gpu:
    """The toolkit and the NCCL of a GPU build."""

    cuda_home: Path  # the toolkit; its nvcc is in bin/
    cuda: str  # the toolkit's version, e.g. "13.0"
    nccl_headers: Path  # the folder of nccl.h
    nccl_library: Path  # libnccl.so.2, or a link to it
    nccl: str  # NCCL's version, e.g. "2.28.9"
    # compute capabilities to compile for, e.g. "80,90"; empty means all that the toolkit supports
    architectures: str = ""

    @property
    def runtime(self) -> Path | None:
        """The toolkit's libcudart.so or a link to it, or None without one."""
        return min(self.cuda_home.glob("lib*/libcudart.so*"), default=None)

    def __str__(self) -> str:
        return f"CUDA {self.cuda} in {self.cuda_home}, NCCL {self.nccl} in {self.nccl_library.parent}"


def find_gpu(cuda_major: str) -> Gpu:
    """Return the first toolkit whose major version matches the frameworks, and an NCCL."""
    seen = []
    for home in _cuda_homes():
        release = re.search(r"release (\d+\.\d+)", output_of(str(home / "bin" / "nvcc"), "--version") or "")
        version = release[1] if release else ""
        if version.partition(".")[0] == cuda_major:
            headers, library = _find_nccl(home)
            text = (headers / "nccl.h").read_text(encoding="utf-8", errors="replace")
            return Gpu(
                cuda_home=home,
                cuda=version,
                nccl_headers=headers,
                nccl_library=library,
                nccl=".".join(re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text)),
                architectures=os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", ""),
            )
        if version:
            seen.append(f"CUDA {version} in {home}")
    found = f"found: {', '.join(seen)}" if seen else "there is no nvcc"
    raise HorovodBuildError(
        f"--gpu nccl needs the CUDA {cuda_major} toolkit, as the framework was built with it; {found}.",
        f"Install a CUDA {cuda_major} toolkit and set CUDA_HOME to it, or build for CPUs: --gpu none.",
    )


def _cuda_homes() -> Iterator[Path]:
    yield from (Path(home) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if (home := os.environ.get(name)))
    if nvcc := shutil.which("nvcc"):
        # nvcc may be a link or a script of another toolkit: its output contains its real location.
        plan = output_of(nvcc, "-dryrun", "-E", "-x", "cu", os.devnull) or ""
        top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
        yield Path(top[1]).resolve() if top else Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")
    # The wheels of CUDA 13 (nvidia-cuda-nvcc, -crt, -runtime, -cccl) form one toolkit.
    yield from sorted(packages_folder().glob("nvidia/cu[0-9]*"))


def _find_nccl(cuda_home: Path) -> tuple[Path, Path]:
    """Return NCCL's header folder and library."""
    # PyTorch's own copy has precedence: it is the one that the process loads.
    homes = [packages_folder() / "nvidia" / "nccl"]
    homes += [Path(os.environ[name]) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if os.environ.get(name)]
    homes += [cuda_home, Path("/usr")]
    for home in homes:
        patterns = ("lib", "lib64", "lib/*-linux-gnu")
        libraries = [found for pattern in patterns for found in home.glob(f"{pattern}/libnccl.so*")]
        if (home / "include" / "nccl.h").is_file() and libraries:
            return home / "include", min(libraries)
    raise HorovodBuildError(
        f"--gpu nccl needs NCCL with its header nccl.h; looked in {', '.join(map(str, homes))}.",
        "PyTorch's CUDA builds bring it (pip install nvidia-nccl-cu13 or -cu12); or set NCCL_HOME.",
    )


CMAKE_NEEDED = (3, 18)
# The modules that Horovod's own build imports, and what pip calls them.
_BUILD_MODULES = {
    **{name: name for name in ("cffi", "cloudpickle", "packaging", "psutil", "setuptools", "wheel")},
    "yaml": "pyyaml",
}
_GET_COMPILER = "apt install build-essential, or dnf install gcc-c++ make"


@dataclass(frozen=True)
class Toolchain:
    """The tools of a build."""

    cxx: str  # the C++ compiler and its fixed arguments
    compiler: str  # its name and version
    cmake: Path  # the program


def find_toolchain() -> Toolchain:
    """Find everything that a build needs from the machine; an error names all that is missing."""
    faults = list(_python_faults())
    cxx = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "")
    version = output_of(*shlex.split(cxx), "--version") if cxx else None
    if version is None:
        faults.append(f"There is no C++ compiler{f' {cxx!r}' * bool(cxx)}.\n  {_GET_COMPILER}")
    if not shutil.which("make"):
        faults.append(f"There is no make.\n  {_GET_COMPILER}")
    candidates = (os.environ.get("HOROVOD_CMAKE"), scripts_folder() / "cmake", shutil.which("cmake"))
    cmake = next((Path(one) for one in candidates if one and _is_new_enough(str(one))), None)
    if cmake is None:
        faults.append(f"There is no CMake {'.'.join(map(str, CMAKE_NEEDED))} or newer.\n  pip install cmake")
    if cmake is None or faults:
        raise HorovodBuildError("Horovod cannot be built here yet:\n- " + "\n- ".join(faults))
    return Toolchain(cxx=cxx, compiler=(version or "").partition("\n")[0].strip(), cmake=cmake)


def _is_new_enough(cmake: str) -> bool:
    version = re.search(r"version (\d+)\.(\d+)", output_of(cmake, "--version") or "")
    return version is not None and (int(version[1]), int(version[2])) >= CMAKE_NEEDED


def _python_faults() -> Iterator[str]:
    if not importlib.util.find_spec("pip"):
        yield "There is no pip in this environment.\n  python -m ensurepip"
    if missing := [pip for name, pip in _BUILD_MODULES.items() if not importlib.util.find_spec(name)]:
        yield f"Packages are missing: {', '.join(missing)}.\n  pip install {' '.join(missing)}"
    if not (headers := Path(sysconfig.get_path("include")) / "Python.h").is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        yield (
            f"Python's header files are missing ({headers}).\n"
            f"  apt install {python}-dev, or dnf install python3-devel"
        )
    managed = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    folder = packages_folder()
    if (sys.prefix == sys.base_prefix and managed.is_file()) or (
        folder.exists() and not os.access(folder, os.W_OK)
    ):
        yield (
            f"pip may not install into {folder}.\n"
            "  Make a virtual environment: python -m venv .venv && . .venv/bin/activate"
        )


def architecture_flags() -> str:
    """Return compiler flags for those vector units used by Horovod that this CPU has: a part of the key."""
    if given := os.environ.get("HOROVOD_BUILD_ARCH_FLAGS", "").strip():
        return given
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    units = flags.group(1).split() if flags else []
    return " ".join(f"-m{unit}" for unit in ("f16c", "avx", "fma") if unit in units)
