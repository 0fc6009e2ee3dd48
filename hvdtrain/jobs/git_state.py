"""The commit of the repository that a folder is in, by git, in bounded time."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.host.processes import run_limited

LIMIT_SECONDS = 2.0
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
        done = run_limited(command, max(0.0, until - time.monotonic()), environ)
    except OSError:
        return None
    return done.output.strip() if done.code == 0 else None
