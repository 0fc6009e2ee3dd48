"""What the workers of an elastic job have in common beside model and optimizer; rank 0 tells the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.backends.step_signals import ControlFlags
from hvdtrain.data.fingerprint import Fingerprint
from hvdtrain.jobs.opening.data_identity import first_samples
from hvdtrain.jobs.opening.setup import common_values, model_values
from hvdtrain.jobs.training_run import TrainingRun
from hvdtrain.reporting.records import RecentRecords
from hvdtrain.run_state import RunState
from hvdtrain.session import Session, SkippedSamples
from hvdtrain.workers.wire_types import travels

_SPEEDS = 1000  # logged windows, of whose speeds the summary has the median


@travels
@dataclass(frozen=True)
class Common:
    """Where a run stands, as its rank 0 tells the others.

    Attributes:
        state: what a checkpoint keeps of it, and what of the last step is done.
        stop: whether a worker wants training to end, saved.
        save: whether a worker wants a save.
        skipped: how many samples could not be read, on all workers.
        reported: which of them the user was told of.
        speeds: samples/s of the last windows.
        seconds: time spent training.
        run_dir: the run directory.
        stopped_early: why and where training ended because nothing got better; empty otherwise.
        data: the fingerprints of the data.
        recent: the last records of the log.
    """

    state: RunState
    stop: bool
    save: bool
    skipped: int
    reported: set[str]
    speeds: list[float]
    seconds: float
    run_dir: Path
    stopped_early: str
    data: dict[str, Fingerprint]
    recent: list[dict[str, Any]]

    @classmethod
    def of(cls, session: Session) -> "Common":
        """Return where a run stands on this worker."""
        return cls(
            state=session.state,
            stop=session.wanted.stop,
            save=session.wanted.save,
            skipped=session.skipped.count,
            reported=session.skipped.reported,
            speeds=session.speeds[-_SPEEDS:],
            seconds=session.report.seconds(),
            run_dir=session.run_dir,
            stopped_early=session.stopped_early,
            data=dict(session.fingerprints),
            recent=list(session.report.recent),
        )

    def give_to(self, session: Session) -> None:
        """Make it where a run stands on this worker, which is not rank 0."""
        session.state = self.state
        session.state.seconds_before = self.seconds
        session.wanted = ControlFlags(self.stop, self.save)
        session.skipped = SkippedSamples(self.skipped, session.skipped.unreported, self.reported)
        session.speeds = self.speeds
        session.run_dir = self.run_dir
        session.stopped_early = self.stopped_early
        session.report.recent = RecentRecords(self.recent)


def values_to_compare(run: TrainingRun) -> Mapping[str, Any]:
    """Return what must be equal on all workers of an elastic job, by the name that an error message uses.

    It is what other jobs compare before they train: config, versions, data and model.
    """
    return {
        **common_values(run.job, run.backend),
        **run.task_data.common_values,
        **first_samples(run.task_data.identity),
        **model_values(run.model),
    }
