"""The folder that keeps built wheels, the source archive and logs, shared by all environments."""

import contextlib
import fcntl
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.horovod_build.ownership import exposure
from hvdtrain.paths import cache_folder

# The number of logs that are kept.
LOGS_KEPT = 10


def default_cache_folder() -> Path:
    """Return $HVDTRAIN_CACHE/horovod if that is set, else hvdtrain/horovod in the user's cache folder."""
    return cache_folder() / "horovod"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class BuildCache:
    """Built wheels by key. Wheels are stored atomically.

    Args:
        folder: the folder; created when something is first stored in it.
    """

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
        """Store a wheel, replacing one with the same key.

        It is written to a temporary folder, which is then renamed.

        Returns:
            Its path in the cache.
        """
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
        """Hold a lock that processes share through the cache folder.

        The operating system releases it when the process ends, even if that is killed.

        Args:
            name: the name of the lock.
            on_wait: called once if another process holds the lock.
        """
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
