"""The commit of the repository that a folder is in, by git, in bounded time."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LIMIT_SECONDS = 2.0
_KILLED_SECONDS = 1.0  # a process that waits for a disk ends when that answers
# of a hook that runs git; they would name another repository than the folder's
_OF_ANOTHER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY")


@dataclass(frozen=True)
class GitState:
    """What git says of a folder.

    Attributes:
        commit: the commit that is checked out; empty if the folder is in no repository, or git is missing.
        is_dirty: whether files that git tracks were changed since; None if that is not known.
    """

    commit: str = ""
    is_dirty: bool | None = None

    def describe(self) -> str:
        """Return it in words."""
        if not self.commit:
            return "none"
        return (
            self.commit + {True: ", with changes", False: "", None: ", perhaps with changes"}[self.is_dirty]
        )


def git_state(folder: Path, limit_seconds: float = LIMIT_SECONDS) -> GitState:
    """Ask git for the commit of a folder.

    The repository's file-system monitor is not executed; its content filters (``filter.*.clean``) are, for
    files that may have changed, as by every ``git status``.

    Args:
        folder: the folder.
        limit_seconds: after this time the answer is that it is not known.
    """
    until = time.monotonic() + limit_seconds
    commit = _ask(folder, ["rev-parse", "--verify", "HEAD"], until)
    if not commit:
        return GitState()
    changes = _ask(folder, ["status", "--porcelain", "--untracked-files=no"], until)
    return GitState(commit, None if changes is None else bool(changes))


def _ask(folder: Path, words: list[str], until: float) -> str | None:
    """Return git's answer; None if it gives none in time."""
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "-C", str(folder), *words]
    environ = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}
    try:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        answer, _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        assert process.stdout is not None
        process.stdout.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_SECONDS)
        return None
    return answer.decode(errors="replace").strip() if process.returncode == 0 else None
