"""What one worker of an elastic job was asked to do: by signals, and by the driver of the job."""

import signal
from dataclasses import dataclass

from hvdtrain.backends.step_signals import ControlFlags
from hvdtrain.elastic.member import Membership
from hvdtrain.jobs.signals import Signals


@dataclass
class AskedOfWorker:
    """What this worker of an elastic job was asked to do. A signal to it alone means that it leaves.

    Attributes:
        signals: what signals asked of this worker.
        membership: what the driver asked of all of them.
    """

    signals: Signals
    membership: Membership

    @property
    def number(self) -> int | None:
        """The signal for which all workers are to stop; None if there is none."""
        return self.membership.stop_wanted() or None

    def poll(self) -> ControlFlags:
        """Return what this worker wants all of them to do."""
        flags = self.signals.poll()
        if flags.stop:
            self.membership.leave(f"{signal.Signals(self.signals.number or 0).name} came")
        return ControlFlags(
            stop=self.number is not None, save=flags.save, change=self.membership.change_wanted()
        )
