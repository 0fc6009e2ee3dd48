"""The folder that keeps built wheels, the source archive and logs, shared by all environments."""

import contextlib
import fcntl
import grp
import hashlib
import json
import os
import pwd
import shutil
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.errors import HorovodBuildError
from hvdtrain.host.processes import run_limited
from hvdtrain.storage.files import cache_folder

LOGS_KEPT = 10
VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
DOWNLOAD_LIMIT_SECONDS = 900


def exposure(path: Path) -> str:
    """Return why somebody other than this user and root could change a file or folder; empty if nobody can.

    In a folder above that others can write they could replace the next one, unless its sticky bit is set.
    What does not exist yet is not looked at, nor what this user may not reach: nothing is taken from there.
    """
    me, paths = os.geteuid(), [path.absolute(), path.resolve()]
    for place in dict.fromkeys(place for one in paths for place in (one, *one.parents)):
        try:
            status = place.stat()
        except (FileNotFoundError, PermissionError):
            continue
        if status.st_uid not in (0, me):
            return f"{place} belongs to user {status.st_uid}"
        others = stat.S_IWOTH if _is_own_group(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP
        if status.st_mode & others and (place in paths or not status.st_mode & stat.S_ISVTX):
            who = "everybody" if status.st_mode & stat.S_IWOTH else f"group {status.st_gid}"
            return f"{place} can be written by {who}"
    return ""


def _is_own_group(number: int) -> bool:
    """Return whether a group is root's, or this user's own: that with the user's name and no other member."""
    if number == 0:
        return True
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def default_cache_folder() -> Path:
    """Return $HVDTRAIN_CACHE/horovod if that is set, else hvdtrain/horovod in the user's cache folder."""
    return cache_folder() / "horovod"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class BuildCache:
    """Built wheels by key. Wheels are stored atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def archives(self) -> Path:
        """The folder of the source archive."""
        return self._made("source")

    def wheel(self, key: str) -> Path | None:
        """Return the wheel built for a key, or None if there is no good one, or others can change it."""
        entry = self.folder / "wheels" / key
        try:
            stored = json.loads((entry / "wheel.json").read_text(encoding="utf-8"))
            wheel = entry / str(stored["name"])
            if exposure(entry / "wheel.json") or exposure(wheel):
                return None
            return wheel if sha256_of(wheel) == stored["sha256"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def store(self, key: str, wheel: Path) -> Path:
        """Store a wheel whole, replacing one with the same key; return its path in the cache."""
        wheels = self._made("wheels")
        entry = wheels / key
        # The name differs from every key, so that a leftover folder is never used as an entry.
        written = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=wheels))
        try:
            shutil.copyfile(wheel, written / wheel.name)
            stored = {"name": wheel.name, "sha256": sha256_of(written / wheel.name)}
            (written / "wheel.json").write_text(json.dumps(stored), encoding="utf-8")
            for file in (written / wheel.name, written / "wheel.json"):
                file.chmod(0o644)  # whatever the umask: others may read it, and not write
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

    def new_log(self, key: str) -> Path:
        """Return a path for the log of a build, and remove the oldest logs."""
        logs = self._made("logs")
        old = sorted(logs.glob("*.log"), key=lambda log: log.stat().st_mtime)
        for log in old[: -(LOGS_KEPT - 1)]:
            log.unlink(missing_ok=True)
        return logs / f"{key}-{time.strftime('%Y%m%d-%H%M%S')}.log"

    @contextlib.contextmanager
    def lock(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold a lock that processes share through the cache folder; call ``on_wait`` if another holds it."""
        with (self._made("locks") / name).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _made(self, name: str) -> Path:
        folder = self.folder / name
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        folder.mkdir(mode=0o755, exist_ok=True)
        return folder


def fetch_source(cache: BuildCache) -> Path:
    """Return the source archive: from the cache, or downloaded by pip with the user's pip settings."""
    kept = cache.archives / SDIST
    if kept.is_file() and sha256_of(kept) == SDIST_SHA256:
        return kept
    with tempfile.TemporaryDirectory(prefix="hvdtrain-", dir=cache.archives) as folder:
        _download(Path(folder))
        verify(Path(folder) / SDIST)
        (Path(folder) / SDIST).replace(kept)
    return kept


def verify(archive: Path) -> None:
    """Raise an error unless a file is the pinned archive."""
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
    done = run_limited(command, DOWNLOAD_LIMIT_SECONDS)
    if done.code != 0 or not (folder / SDIST).is_file():
        lines = (done.output + done.errors).splitlines()[-8:]
        how = f"in {DOWNLOAD_LIMIT_SECONDS} seconds" if done.code is None else f"(exit code {done.code})"
        raise HorovodBuildError(
            f"pip could not download the source of Horovod {VERSION} {how}. It said:\n"
            + "\n".join(f"  {line}" for line in lines),
            f"Check pip's package index, or put {SDIST} into {folder.parent} by hand.",
        )
