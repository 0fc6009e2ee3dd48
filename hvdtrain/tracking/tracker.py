"""What a sender asks of a tracker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.tracking.rows import Row
from hvdtrain.tracking.state import SenderState


@dataclass(frozen=True)
class TrackedRun:
    """What is known of a run beside its log.

    Attributes:
        folder: the run directory.
        tracking_id: its name among trackers.
        config: the resolved config of its last job in this directory.
        began_seconds: when training began, since the epoch of the system's clock.
    """

    folder: Path
    tracking_id: str
    config: Mapping[str, Any] = field(default_factory=dict)
    began_seconds: float = 0.0

    @property
    def name(self) -> str:
        """The name that people see."""
        return self.folder.resolve().name


class Tracker(Protocol):
    """A tracker's library, as a sender uses it. Every method may raise any exception: it is tried again.

    Attributes:
        notes: what the user should know; whoever shows it removes it.
        ends_last: whether checkpoints can be sent only as long as the run has not ended.
    """

    notes: list[str]
    ends_last: bool

    def open(self, run: TrackedRun, state: SenderState) -> bool:
        """Find the run there, or make it; note in the state where it is, and its last step if that changed.

        Returns:
            Whether it is the run that the state named: what was sent is there.
        """
        ...

    def is_up_to_date(self, state: SenderState) -> bool:
        """Return whether a run that has nothing new need not be opened: it is where it would be sent.

        Args:
            state: what the sender keeps of it.
        """
        ...

    def start(self, start: Mapping[str, Any], number: int) -> None:
        """Send what is known of a job.

        Args:
            start: its values by name.
            number: how many jobs of the run came before.
        """
        ...

    def send(self, rows: Sequence[Row]) -> None:
        """Send lines of the log."""
        ...

    def repeat(self, first: int, last: int) -> None:
        """Say that steps that were sent are done again, and will be sent again."""
        ...

    def checkpoint(self, folder: Path) -> None:
        """Send a checkpoint of the run that was opened last."""
        ...

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Send how the run ended, and wait until all of it has arrived.

        Args:
            status: one of the words of ``reporting.run_status``.
            summary: what the run says of its end.
        """
        ...


class PermanentError(Exception):
    """A tracker cannot be sent to until the user changes something; the text says what."""
