"""The folder that keeps built wheels, the source archive and logs, shared by all environments."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Logs of older builds are removed.
LOGS_KEPT = 10


def default_cache_folder() -> Path:
    """Return $HVDTRAIN_CACHE/horovod, else hvdtrain/horovod in the user's cache folder."""
    if os.environ.get("HVDTRAIN_CACHE"):
        return Path(os.environ["HVDTRAIN_CACHE"]) / "horovod"
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user) / "hvdtrain" / "horovod"


def sha256_of(path: Path) -> str:
    """Compute the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class BuildCache:
    """Built wheels by key. A wheel is there whole or not at all, whatever was interrupted.

    Args:
        folder: created when something is first put into it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def archives(self) -> Path:
        """Where the source archive is kept."""
        return self._made("source")

    def wheel(self, key: str) -> Path | None:
        """Return the wheel built for a key; None where there is none, or it is not as it was written."""
        entry = self.folder / "wheels" / key
        try:
            stored = json.loads((entry / "wheel.json").read_text(encoding="utf-8"))
            wheel = entry / str(stored["name"])
            return wheel if sha256_of(wheel) == stored["sha256"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def store(self, key: str, wheel: Path) -> Path:
        """Put a wheel into the cache, in place of one that may be there.

        It is written beside its place and moved there in one step.

        Returns:
            Its path in the cache.
        """
        wheels = self._made("wheels")
        entry = wheels / key
        # The name must not be a key's: a folder that is left over is then never taken for one.
        written = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=wheels))
        try:
            shutil.copyfile(wheel, written / wheel.name)
            stored = {"name": wheel.name, "sha256": sha256_of(written / wheel.name)}
            (written / "wheel.json").write_text(json.dumps(stored), encoding="utf-8")
            written.chmod(0o755)
            self.remove(key)
            written.rename(entry)
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise
        return entry / wheel.name

    def remove(self, key: str) -> None:
        """Forget the wheel of a key."""
        shutil.rmtree(self.folder / "wheels" / key, ignore_errors=True)

    def new_log(self, key: str) -> Path:
        """Choose a path for the log of a build; the oldest logs go."""
        logs = self._made("logs")
        old = sorted(logs.glob("*.log"), key=lambda log: log.stat().st_mtime)
        for log in old[: -(LOGS_KEPT - 1)]:
            log.unlink(missing_ok=True)
        return logs / f"{key}-{time.strftime('%Y%m%d-%H%M%S')}.log"

    @contextlib.contextmanager
    def lock(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold a lock that processes share through the cache folder.

        The system releases it when its holder ends, however that happens.

        Args:
            name: what is locked.
            on_wait: called once where another process holds it.
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
        folder.mkdir(parents=True, exist_ok=True)
        return folder
