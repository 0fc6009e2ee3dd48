"""How long a worker of an elastic job may write files without hearing its driver."""

import time
from collections.abc import Callable

_PAUSE_SECONDS = 3.0  # a thread that turns once a second and was away for longer was stopped, or starved
_FRESH_SECONDS = 2.0  # what arrives so long after that was not sent while it was away
REGAINED_SECONDS = 4.0  # in which a driver that is there renews the lease of a worker that was stopped


def boot_seconds() -> float:
    """Return the seconds since the host started; they go on while it is suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS has no such clock
    return time.clock_gettime(clock)


class Lease:
    """The time for which the driver counts on this worker: it gives its place to nobody before it is over.

    A process that was stopped finds messages that arrived meanwhile: they do not say that the driver still
    counts on it, so they renew nothing.

    Args:
        seconds: how long it lasts after the driver was heard.
        clock: gives the time.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = boot_seconds) -> None:
        self.seconds, self._clock = seconds, clock
        self._heard = self._turned = self._clock()
        self._back = self._heard - REGAINED_SECONDS  # when this process last ran again after it was stopped

    def turn(self) -> None:
        """Note that this process runs; called more than once in three seconds."""
        now = self._clock()
        if now - self._turned > _PAUSE_SECONDS:
            self._back = now
        self._turned = now

    def renew(self) -> None:
        """Take note that the driver was heard."""
        self.turn()
        if self._turned - self._back >= _FRESH_SECONDS:
            self._heard = self._turned

    @property
    def silent_seconds(self) -> float:
        """How long the driver has not been heard."""
        return self._clock() - self._heard

    @property
    def is_lost(self) -> bool:
        """Whether the lease has run out."""
        return self.silent_seconds > self.seconds

    @property
    def was_stopped(self) -> bool:
        """Whether this process was stopped or starved a moment ago, so that it may have missed its end."""
        return self._clock() - self._back < REGAINED_SECONDS

    @property
    def may_be_regained(self) -> bool:
        """Whether the lease has run out, and this process may hear the driver in a moment."""
        now = self._clock()
        since = now if now - self._turned > _PAUSE_SECONDS else max(self._back, self._heard + self.seconds)
        return self.is_lost and now - since < REGAINED_SECONDS
