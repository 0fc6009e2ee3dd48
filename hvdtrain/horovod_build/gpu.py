"""Finding the CUDA toolkit and the NCCL for a build that reduces on GPUs."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.processes import output_of, packages_folder


@dataclass(frozen=True)
class Gpu:
    """The toolkit and the NCCL of a GPU build.

    Args:
        cuda_home: the toolkit; its nvcc is in bin/.
        cuda: the toolkit's version, e.g. "13.0".
        nccl_headers: the folder of nccl.h.
        nccl_library: libnccl.so.2, or a link to it.
        nccl: NCCL's version, e.g. "2.28.9".
        architectures: compute capabilities to compile for, e.g. "80,90"; empty means all that
            the toolkit supports.
    """

    cuda_home: Path
    cuda: str
    nccl_headers: Path
    nccl_library: Path
    nccl: str
    architectures: str = ""

    @property
    def runtime(self) -> Path | None:
        """The toolkit's libcudart.so or a link to it, or None without one."""
        return min(self.cuda_home.glob("lib*/libcudart.so*"), default=None)

    def __str__(self) -> str:
        return f"CUDA {self.cuda} in {self.cuda_home}, NCCL {self.nccl} in {self.nccl_library.parent}"


def find_gpu(cuda_major: str) -> Gpu:
    """Return the first toolkit whose major version matches the frameworks, and an NCCL.

    Args:
        cuda_major: the major version that the frameworks were built with, e.g. "13".

    Raises:
        HorovodBuildError: If there is no toolkit of that version, or no NCCL with its header.
    """
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
        libraries = [
            *home.glob("lib/libnccl.so*"),
            *home.glob("lib64/libnccl.so*"),
            *home.glob("lib/*-linux-gnu/libnccl.so*"),
        ]
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
