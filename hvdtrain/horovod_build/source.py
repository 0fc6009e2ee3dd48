"""Getting Horovod's source: downloaded by pip, verified, unpacked."""

import os
import sys
import tarfile
import tempfile
from pathlib import Path

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.cache import BuildCache, sha256_of
from hvdtrain.horovod_build.processes import run_logged

VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

DOWNLOAD_LIMIT_SECONDS = 900


def fetch_source(cache: BuildCache) -> Path:
    """Return the source archive: from the cache, or downloaded by pip with the user's pip settings.

    Raises:
        HorovodBuildError: If it cannot be downloaded, or is not the archive that the patches
            were made for.
    """
    kept = cache.archives / SDIST
    if kept.is_file() and sha256_of(kept) == SDIST_SHA256:
        return kept
    with tempfile.TemporaryDirectory(prefix="hvdtrain-", dir=cache.archives) as folder:
        _download(Path(folder))
        verify(Path(folder) / SDIST)
        (Path(folder) / SDIST).replace(kept)
    return kept


def verify(archive: Path) -> None:
    """Raise an error unless a file is the pinned archive.

    Raises:
        HorovodBuildError: If its sha256 differs.
    """
    found = sha256_of(archive)
    if found != SDIST_SHA256:
        raise HorovodBuildError(
            f"{archive.name} has sha256 {found}, not {SDIST_SHA256}.",
            f"Only the published source of Horovod {VERSION} is built: look at your package index.",
        )


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the verified archive into a folder and return the source tree."""
    verify(archive)
    with tarfile.open(archive) as file:
        # Pythons older than 3.11.4 have no filter.
        file.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        file.extractall(folder)
    return folder / f"horovod-{VERSION}"


def _download(folder: Path) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps"]
    # pip runs the source's setup.py to find its name and version. Without isolation it uses
    # the installed setuptools, and downloads nothing else.
    command += ["--no-binary", "horovod", "--no-build-isolation", "--disable-pip-version-check"]
    command += ["--dest", str(folder), "-r", str(requirements)]
    lines: list[str] = []
    with (folder / "pip.log").open("w", encoding="utf-8") as log:
        try:
            exit_code = run_logged(
                command,
                log,
                env=dict(os.environ),
                folder=folder,
                limit_seconds=DOWNLOAD_LIMIT_SECONDS,
                on_line=lines.append,
            )
        except TimeoutError as error:
            raise HorovodBuildError(f"pip could not download {SDIST}: {error}.") from error
    if exit_code != 0 or not (folder / SDIST).is_file():
        raise HorovodBuildError(
            f"pip could not download the source of Horovod {VERSION}. It said:\n"
            + "".join(f"  {line}" for line in lines[-8:]).rstrip(),
            f"Check pip's package index, or put {SDIST} into {folder.parent} by hand.",
        )
