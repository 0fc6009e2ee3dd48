"""Workers that end at the same step again and again: the next attempt would do the same."""

import signal
from collections.abc import Hashable, Set

SAME_STEP = 3
SAME_STEP_LOST = 10

# what ends a process from outside, so that it says nothing of the step
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SSH_FAILED, COMMAND_NOT_FOUND = 255, 127  # exit codes of ssh and of a shell
_FROM_OUTSIDE = {0, SSH_FAILED, *(-one for one in _SIGNALS), *(128 + one for one in _SIGNALS)}


def is_crash(code: int) -> bool:
    """Return whether an exit code speaks of the process itself and not of whoever ended it."""
    return code not in _FROM_OUTSIDE


def describe_exit(code: int, *, has_joined: bool = True) -> str:
    """Return an exit code in words, such as "killed (SIGKILL)".

    Args:
        code: the exit code; that of a signal is negative.
        has_joined: whether the process had become a worker of the job.
    """
    if code < 0:
        try:
            return f"killed ({signal.Signals(-code).name})"
        except ValueError:
            return f"killed (signal {-code})"
    meaning = {SSH_FAILED: ", as ssh does if it cannot log in or its connection ends"}
    if has_joined:
        meaning[0] = " in the middle of the job (sys.exit() or os._exit(0) in the task?)"
    else:
        meaning |= {0: " and did not join the job", COMMAND_NOT_FOUND: ": the command was not found"}
    return f"ended with exit code {code}{meaning.get(code, '')}"


class Crashes:
    """Counts worlds that broke one after the other, by workers that were lost, without a step between.

    A crash speaks of the process itself. A worker that is killed or freezes may be lost for reasons of its
    host, so that more of these end the job.
    """

    def __init__(self) -> None:
        self._broke_at: list[tuple[int, Hashable]] = []  # generation, and where its survivors stand
        self._crashed: set[int] = set()
        self._lost: set[int] = set()

    def lost(self, generation: int) -> None:
        """Take note that a worker of a world was lost, whatever the reason."""
        self._lost.add(generation)

    def crashed(self, generation: int) -> None:
        """Take note that a worker of a world crashed, which may be known only after the next was formed."""
        self._crashed.add(generation)

    def broke(self, generation: int, where: Hashable) -> None:
        """Take note that a world broke, and where the training went on.

        Args:
            generation: its number.
            where: the place of the survivors, or that of the checkpoint from which they went on.
        """
        self._broke_at = [*self._broke_at, (generation, where)][-SAME_STEP_LOST:]

    def is_repeated(self) -> bool:
        """Return whether the last worlds all broke by a crash at the same place."""
        return self._all_at_one_place(SAME_STEP, self._crashed)

    def is_lost_again(self) -> bool:
        """Return whether the last worlds, more of them, all lost a worker at the same place."""
        return self._all_at_one_place(SAME_STEP_LOST, self._lost | self._crashed)

    def _all_at_one_place(self, count: int, generations: Set[int]) -> bool:
        last = self._broke_at[-count:]
        return (
            len(last) == count
            and len({where for _, where in last}) == 1
            and all(generation in generations for generation, _ in last)
        )
