"""The recording of some steps, as the loop sees it."""

from typing import Any, Protocol


class Profile(Protocol):
    """Records the steps that the config asks for. The loop calls it; without such steps it does nothing."""

    def enter(self) -> None:
        """Collective if steps are to be recorded. Begin to train with these workers."""
        ...

    def is_due(self, step: int) -> bool:
        """Return whether the recording begins or ends before this step. Local, the same on all workers."""
        ...

    def take(self, step: int) -> None:
        """Collective. Begin or end the recording before this step.

        Raises:
            PeerLostError: If another worker went away.
        """
        ...

    def end(self, step: int) -> None:
        """Collective if steps are being recorded. End: this was the last step."""
        ...

    def __enter__(self) -> Any:
        """Return it; if the context is left by an exception, what was recorded so far is written."""
        ...

    def __exit__(self, *exception: object) -> None: ...


class NoProfile:
    """Records nothing."""

    def enter(self) -> None:
        """Do nothing."""

    def is_due(self, step: int) -> bool:
        """Return False."""
        return False

    def take(self, step: int) -> None:
        """Do nothing."""

    def end(self, step: int) -> None:
        """Do nothing."""

    def __enter__(self) -> "NoProfile":
        """Return it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing."""
