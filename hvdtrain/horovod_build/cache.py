"""The folder that keeps built wheels, the source archive and logs, shared by all environments."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.errors import HorovodBuildError
from hvdtrain.host.processes import run_limited
from hvdtrain.storage.files import cache_folder

VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
DOWNLOAD_LIMIT_SECONDS = 900


class BuildCache:
    """Built wheels by key, the source archive, and logs; no other user but root can change them."""

    def __init__(self) -> None:
        self.folder = folder = cache_folder() / "horovod"
        for place in (folder, folder / "wheels", folder / "source", folder / "logs"):
            place.mkdir(mode=0o755, parents=True, exist_ok=True)
            status = place.stat()
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise HorovodBuildError(
                    f"Others can write into the cache {place}, and could replace what is installed from it.",
                    "Make it yours alone (chown, chmod go-w), or set HVDTRAIN_CACHE to a folder that is.",
                )

    def wheel(self, key: str) -> Path | None:
        """Return the wheel built for a key, or None if there is none."""
        return next((self.folder / "wheels" / key).glob("*.whl"), None)

    def store(self, key: str, wheel: Path) -> Path:
        """Store a wheel whole, replacing one with the same key; return its path in the cache."""
        entry = self.folder / "wheels" / key
        written = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=entry.parent))
        try:
            shutil.copyfile(wheel, written / wheel.name)
            (written / wheel.name).chmod(0o644)  # whatever the umask: others may read it, and not write
            written.chmod(0o755)
            self.remove(key)
            written.rename(entry)
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise
        return entry / wheel.name

    def remove(self, key: str) -> None:
        """Remove the wheel of a key, if there is one."""
        shutil.rmtree(self.folder / "wheels" / key, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Let one process build at a time; call ``on_wait`` if another one does."""
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def fetch_source(cache: BuildCache) -> Path:
    """Return the source archive: from the cache, or downloaded by pip with the user's pip settings."""
    kept = cache.folder / "source" / SDIST
    if not kept.is_file() or _sha256_of(kept) != SDIST_SHA256:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-", dir=kept.parent) as folder:
            _download(Path(folder))
            (Path(folder) / SDIST).replace(kept)
    return kept


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the archive, if it is the pinned one, into a folder and return the source tree."""
    if (found := _sha256_of(archive)) != SDIST_SHA256:
        raise HorovodBuildError(
            f"{archive.name} has sha256 {found}, not {SDIST_SHA256}.",
            f"Only the published source of Horovod {VERSION} is built: look at your package index.",
        )
    with tarfile.open(archive) as file:
        # Pythons older than 3.11.4 have no filter.
        file.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        file.extractall(folder)
    return folder / f"horovod-{VERSION}"


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(folder: Path) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps"]
    # pip runs the source's setup.py to find its name and version. Without isolation it uses
    # the installed setuptools, and downloads nothing else.
    command += ["--no-binary", "horovod", "--no-build-isolation", "--disable-pip-version-check"]
    command += ["--dest", str(folder), "-r", str(requirements)]
    done = run_limited(command, DOWNLOAD_LIMIT_SECONDS)
    if done.code != 0 or not (folder / SDIST).is_file():
        how = f"in {DOWNLOAD_LIMIT_SECONDS} seconds" if done.code is None else f"(exit code {done.code})"
        lines = "\n  ".join((done.output + done.errors).splitlines()[-8:])
        raise HorovodBuildError(
            f"pip could not download the source of Horovod {VERSION} {how}. It said:\n  {lines}",
            f"Check pip's package index, or put {SDIST} into {folder.parent} by hand.",
        )
