"""What changed between two worlds that trained, for the line that says it and for those that trace it."""

from collections.abc import Collection, Sequence

from hvdtrain.elastic.driver.roster import Worker
from hvdtrain.workers.world import Change


class ChangeLog:
    """Who left and who came since the last world that trained, and since when nobody trains.

    Rank 0 of a world records its change as soon as it has the state. If the world breaks before all have it,
    the next one's change holds only what was not recorded.

    Attributes:
        cause: why the last world that trained ended, in words; empty while one trains.
    """

    def __init__(self) -> None:
        self._trained: list[tuple[Worker, str]] = []  # with rank and host as they were then
        self._recorded: list[tuple[Worker, str]] = []  # the members when rank 0 last recorded a change
        self._began: float | None = None
        self._unrecorded_since: float | None = None
        self._why = self.cause = ""

    def begin(self, why: str, now: float) -> None:
        """Take note that the current world ends; a change that has begun keeps its reason."""
        if not self._trained:
            return
        if self._began is None:
            self._began, self.cause = now, why
        if self._unrecorded_since is None:
            self._unrecorded_since, self._why = now, why

    def is_new(self, worker: Worker) -> bool:
        """Return whether a worker was not in the last world that trained."""
        return all(one is not worker for one, _ in self._trained)

    def describe(self, members: Collection[Worker], now: float) -> Change | None:
        """Return what changes with a world of these members since rank 0 last recorded a change.

        None if nothing has been trained.
        """
        if not self._trained:
            return None
        since = now if self._unrecorded_since is None else self._unrecorded_since
        return Change(
            left=tuple(_left(self._recorded, members)),
            joined=tuple(_joined(self._recorded, members)),
            why=self._why,
            since_seconds=round(now - since, 3),
        )

    def describe_all(self, members: Collection[Worker]) -> tuple[list[str], list[str]] | None:
        """Return who left and who came since the last world that trained; None if there was none."""
        if not self._trained:
            return None
        return _left(self._trained, members), _joined(self._trained, members)

    def seconds(self, now: float) -> float:
        """Return how long nobody trains."""
        return 0.0 if self._began is None else now - self._began

    def record(self, members: Sequence[Worker]) -> None:
        """Take note that rank 0 of a world of these members records its change."""
        if self._trained:
            self._recorded = _named(members)
            self._unrecorded_since, self._why = None, ""

    def settle(self, members: Sequence[Worker]) -> None:
        """Take note that a world trains."""
        self._trained = self._recorded = _named(members)
        self._began = self._unrecorded_since = None
        self._why = self.cause = ""


def _named(members: Sequence[Worker]) -> list[tuple[Worker, str]]:
    return [(one, f"rank {one.rank} on {one.slot.host}") for one in members]


def _left(before: Sequence[tuple[Worker, str]], members: Collection[Worker]) -> list[str]:
    gone = [(one, name) for one, name in before if one not in members]
    return [f"{name}: {one.reason or one.wants_out or 'has ended'}" for one, name in gone]


def _joined(before: Sequence[tuple[Worker, str]], members: Collection[Worker]) -> list[str]:
    known = [one for one, _ in before]
    return [str(one.slot) for one in members if one not in known]
