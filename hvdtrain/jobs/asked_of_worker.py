"""What one worker of an elastic job was asked to do: by signals, and by the driver of the job."""

from dataclasses import dataclass

from hvdtrain.backends.step_signals import ControlFlags
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.jobs.signals import Signals


@dataclass
class AskedOfWorker:
    """What this worker of an elastic job was asked to do.

    A signal to it alone never stops the others: ``ElasticSignals`` lets this worker leave.

    Attributes:
        signals: what signals asked of this worker.
        membership: what the driver asked of all of them.
    """

    signals: Signals
    membership: Membership

    @property
    def why(self) -> str:
        """Why all workers are to stop, in words; empty if they are not."""
        return self.membership.why_stop()

    def poll(self) -> ControlFlags:
        """Return what this worker wants all of them to do."""
        return ControlFlags(
            stop=bool(self.membership.stop_wanted()),
            save=self.signals.poll().save,
            change=self.membership.change_wanted(),
        )
