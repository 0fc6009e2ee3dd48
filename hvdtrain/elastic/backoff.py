"""Slots that failed, and for how long they are left out."""

from hvdtrain.elastic.driver.cluster import Slot

FIRST_SECONDS = 1.0
FORGOTTEN_SECONDS = 600.0


class Backoff:
    """When a slot may get a worker again.

    The first failure costs a second; the n-th within ten minutes costs the shortest time of the range,
    doubled n times, and at most the longest. Nothing is left out for ever.

    Args:
        cooldown_seconds: the shortest and the longest time.
    """

    def __init__(self, cooldown_seconds: tuple[float, float]) -> None:
        self._shortest, self._longest = cooldown_seconds
        self._failures: dict[Slot, list[float]] = {}
        self._ready: dict[Slot, float] = {}

    def failed(self, slot: Slot, now: float) -> float:
        """Take note of a failure; return the seconds for which the slot is left out."""
        recent = [at for at in self._failures.get(slot, []) if now - at < FORGOTTEN_SECONDS]
        count = len(recent) + 1
        self._failures[slot] = [*recent, now][-32:]
        doubled = self._shortest * 2.0 ** min(count, 30)
        seconds = FIRST_SECONDS if count == 1 else min(self._longest, doubled)
        self._ready[slot] = now + seconds
        return seconds

    def left(self, slot: Slot, now: float) -> None:
        """Take note that the worker of a slot left because it was asked to: the slot may be about to go."""
        self._ready[slot] = now + self._longest

    def forget(self, slot: Slot) -> None:
        """Forget a slot that is no longer there; if it comes back, it may get a worker at once."""
        self._ready.pop(slot, None)

    def ready_at(self, slot: Slot) -> float:
        """Return from when on the slot may get a worker."""
        return self._ready.get(slot, 0.0)
