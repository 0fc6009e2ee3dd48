"""Running other programs so that none outlives the build, and what a build needs from the machine."""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from hvdtrain.errors import HorovodBuildError
from hvdtrain.host.processes import run_limited, start_group

KILL_SECONDS = 10  # that killed processes have to disappear


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


def run_logged(
    command: Sequence[str],
    log: IO[str],
    *,
    env: Mapping[str, str],
    folder: Path,
    limit_seconds: float,
    on_line: Callable[[str], None] = lambda line: None,
) -> int:
    """Run a command, each line of whose output is written to a log; return its exit code.

    At the limit, which is a TimeoutError, or if this process is interrupted, it and all its descendants are
    killed.
    """
    timed_out: list[bool] = []
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    with start_group(command, env=env, cwd=folder, **pipe) as process:

        def stop() -> None:
            timed_out.append(True)
            _end_tree(process.pid)

        timer = threading.Timer(limit_seconds, stop)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                on_line(line)
            exit_code = process.wait()
        except BaseException:
            _end_tree(process.pid)
            raise
        finally:
            timer.cancel()
            timer.join()
    if timed_out:
        raise TimeoutError(f"not done after {limit_seconds:.0f} seconds")
    return exit_code


def _end_tree(pid: int) -> None:
    """Kill a process and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, KILL_SECONDS)


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
        version = _cuda_version(home)
        if version.partition(".")[0] == cuda_major:
            headers, library = _find_nccl(home)
            return Gpu(
                cuda_home=home,
                cuda=version,
                nccl_headers=headers,
                nccl_library=library,
                nccl=_nccl_version(headers),
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
    for variable in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    nvcc = shutil.which("nvcc")
    if nvcc:
        # nvcc may be a link or a script of another toolkit: its output contains its real location.
        plan = output_of(nvcc, "-dryrun", "-E", "-x", "cu", os.devnull) or ""
        top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
        yield Path(top.group(1)).resolve() if top else Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")
    # The wheels of CUDA 13 (nvidia-cuda-nvcc, -crt, -runtime, -cccl) form one toolkit.
    yield from sorted(packages_folder().glob("nvidia/cu[0-9]*"))


def _cuda_version(home: Path) -> str:
    nvcc = home / "bin" / "nvcc"
    text = (output_of(str(nvcc), "--version") or "") if nvcc.is_file() else ""
    release = re.search(r"release (\d+\.\d+)", text)
    return release.group(1) if release else ""


def _find_nccl(cuda_home: Path) -> tuple[Path, Path]:
    """Return NCCL's header folder and library."""
    # PyTorch's own copy has precedence: it is the one that the process loads.
    homes = [packages_folder() / "nvidia" / "nccl"]
    homes += [Path(os.environ[name]) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if os.environ.get(name)]
    homes += [cuda_home, Path("/usr")]
    for home in homes:
        header = home / "include" / "nccl.h"
        patterns = ("lib", "lib64", "lib/*-linux-gnu")
        libraries = [found for pattern in patterns for found in home.glob(f"{pattern}/libnccl.so*")]
        if header.is_file() and libraries:
            return header.parent, min(libraries)
    raise HorovodBuildError(
        f"--gpu nccl needs NCCL with its header nccl.h; looked in {', '.join(map(str, homes))}.",
        "PyTorch's CUDA builds bring it (pip install nvidia-nccl-cu13 or -cu12); or set NCCL_HOME.",
    )


def _nccl_version(headers: Path) -> str:
    text = (headers / "nccl.h").read_text(encoding="utf-8", errors="replace")
    parts = (re.search(rf"#define NCCL_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH"))
    return ".".join(part.group(1) for part in parts if part)


CMAKE_NEEDED = (3, 18)
# The modules that Horovod's own build imports.
_BUILD_MODULES = ("cffi", "cloudpickle", "packaging", "psutil", "setuptools", "wheel", "yaml")

TEMP_GIB_NEEDED = 0.5
CACHE_GIB_NEEDED = 0.1

_GET_COMPILER = "apt install build-essential, or dnf install gcc-c++ make"


@dataclass(frozen=True)
class Toolchain:
    """The tools of a build."""

    cxx: str  # the C++ compiler and its fixed arguments
    compiler: str  # its name and version
    cmake: Path  # the program


def find_toolchain(cache_folder: Path) -> Toolchain:
    """Find everything that a build needs from the machine; an error names all that is missing."""
    faults = [
        *_python_faults(),
        *_disk_faults(Path(tempfile.gettempdir()), TEMP_GIB_NEEDED, "TMPDIR"),
        *_disk_faults(cache_folder, CACHE_GIB_NEEDED, "HVDTRAIN_CACHE"),
    ]
    cxx = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "")
    version = output_of(*shlex.split(cxx), "--version") if cxx else None
    if version is None:
        faults.append(f"There is no C++ compiler{f' {cxx!r}' * bool(cxx)}.\n  {_GET_COMPILER}")
    if not shutil.which("make"):
        faults.append(f"There is no make.\n  {_GET_COMPILER}")
    cmake, cmake_faults = _find_cmake()
    faults += cmake_faults
    if faults:
        raise HorovodBuildError("Horovod cannot be built here yet:\n- " + "\n- ".join(faults))
    return Toolchain(cxx=cxx, compiler=(version or "").partition("\n")[0].strip(), cmake=cmake)


def _python_faults() -> Iterator[str]:
    if not importlib.util.find_spec("pip"):
        yield "There is no pip in this environment.\n  python -m ensurepip"
    missing = [name for name in _BUILD_MODULES if not importlib.util.find_spec(name)]
    if missing:
        packages = ["pyyaml" if name == "yaml" else name for name in missing]
        yield f"Packages are missing: {', '.join(packages)}.\n  pip install {' '.join(packages)}"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        yield (
            f"Python's header files are missing ({headers / 'Python.h'}).\n"
            f"  apt install python{sys.version_info.major}.{sys.version_info.minor}-dev, "
            "or dnf install python3-devel"
        )
    managed = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    in_no_venv = sys.prefix == sys.base_prefix
    if (in_no_venv and managed.is_file()) or not os.access(_existing(packages_folder()), os.W_OK):
        yield (
            f"pip may not install into {packages_folder()}.\n"
            "  Make a virtual environment: python -m venv .venv && . .venv/bin/activate"
        )


def _find_cmake() -> tuple[Path, list[str]]:
    """Return the first CMake that is new enough, or what is wrong with those that were found."""
    needed = ".".join(map(str, CMAKE_NEEDED))
    faults = []
    for candidate in (os.environ.get("HOROVOD_CMAKE"), scripts_folder() / "cmake", shutil.which("cmake")):
        if not candidate or not shutil.which(candidate):
            continue
        text = output_of(str(candidate), "--version")
        version = re.search(r"version (\d+)\.(\d+)\S*", text or "")
        if version and (int(version.group(1)), int(version.group(2))) >= CMAKE_NEEDED:
            return Path(candidate), []
        found = version.group(0).removeprefix("version ") if version else "does not work"
        faults.append(f"{candidate} ({found})")
    problem = f"No CMake {needed} or newer" + (f": {', '.join(faults)}" if faults else "")
    return Path(), [f"{problem}.\n  pip install cmake"]


def _disk_faults(folder: Path, gib_needed: float, variable: str) -> Iterator[str]:
    place = _existing(folder)
    gib_free = shutil.disk_usage(place).free / 2**30
    if not os.access(place, os.W_OK):
        yield f"{place} is not writable.\n  Set {variable} to a folder that is."
    elif gib_free < gib_needed:
        problem = f"{folder} has {gib_free:.1f} GiB free; the build needs {gib_needed:.1f}"
        yield f"{problem}.\n  Make room, or set {variable} to a folder with room."


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if os.access(place, os.F_OK))


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
