"""Workers that crash at the same step again and again: the next attempt would do the same."""

import signal
from collections.abc import Hashable

SAME_STEP = 3

# what ends a process from outside, so that it says nothing of the step
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SSH_FAILED = 255
_FROM_OUTSIDE = {0, _SSH_FAILED, *(-one for one in _SIGNALS), *(128 + one for one in _SIGNALS)}


def is_crash(code: int) -> bool:
    """Return whether an exit code speaks of the process itself and not of whoever ended it."""
    return code not in _FROM_OUTSIDE


def describe_exit(code: int) -> str:
    """Return an exit code in words, such as "killed (SIGKILL)"."""
    if code < 0:
        try:
            return f"killed ({signal.Signals(-code).name})"
        except ValueError:
            return f"killed (signal {-code})"
    if code == 0:
        return "ended with exit code 0 in the middle of the job (sys.exit() or os._exit(0) in the task?)"
    return f"ended with exit code {code}"


class Crashes:
    """Counts worlds that broke one after the other by a crash without a step between."""

    def __init__(self) -> None:
        self._broke_at: list[tuple[int, Hashable]] = []  # generation, and where its survivors stand
        self._crashed: set[int] = set()

    def crashed(self, generation: int) -> None:
        """Take note that a worker of a world crashed, which may be known only after the next was formed."""
        self._crashed.add(generation)

    def broke(self, generation: int, where: Hashable) -> None:
        """Take note that a world broke, and where the training went on.

        Args:
            generation: its number.
            where: the place of the survivors, or that of the checkpoint from which they went on.
        """
        self._broke_at = [*self._broke_at, (generation, where)][-SAME_STEP:]

    def is_repeated(self) -> bool:
        """Return whether the last worlds all broke by a crash at the same place."""
        return (
            len(self._broke_at) == SAME_STEP
            and len({where for _, where in self._broke_at}) == 1
            and all(generation in self._crashed for generation, _ in self._broke_at)
        )
