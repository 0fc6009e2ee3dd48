"""What changed between two worlds that trained, for the line that says it."""

from collections.abc import Collection, Sequence

from hvdtrain.elastic.roster import Worker
from hvdtrain.elastic.world import Change


class ChangeLog:
    """Who left and who came since the last world that trained, and since when nobody trains."""

    def __init__(self) -> None:
        self._trained: list[tuple[Worker, str]] = []  # with rank and host as they were then
        self._began: float | None = None
        self._why = ""

    def begin(self, why: str, now: float) -> None:
        """Take note that the current world ends; a change that has begun keeps its reason."""
        if self._began is None and self._trained:
            self._began, self._why = now, why

    def is_new(self, worker: Worker) -> bool:
        """Return whether a worker was not in the last world that trained."""
        return all(one is not worker for one, _ in self._trained)

    def describe(self, members: Collection[Worker], now: float) -> Change | None:
        """Return what changes with a world of these members; None if nothing has been trained."""
        if not self._trained:
            return None
        return Change(
            left=tuple(self._left(members)),
            joined=tuple(str(one.slot) for one in members if self.is_new(one)),
            why=self._why,
            since_seconds=round(self.seconds(now), 3),
        )

    def seconds(self, now: float) -> float:
        """Return how long nobody trains."""
        return 0.0 if self._began is None else now - self._began

    def settle(self, members: Sequence[Worker]) -> None:
        """Take note that a world trains."""
        self._trained = [(one, f"rank {one.rank} on {one.slot.host}") for one in members]
        self._began, self._why = None, ""

    def _left(self, members: Collection[Worker]) -> list[str]:
        gone = [(one, name) for one, name in self._trained if one not in members]
        return [f"{name}: {one.reason or one.wants_out or 'has ended'}" for one, name in gone]
