"""What a run knows of itself that a checkpoint keeps, and how it is saved and restored."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.config import Config
from hvdtrain.early_stopping import EarlyStoppingState, PlateauState, early_stopping_from, plateau_from
from hvdtrain.metrics import StepInfo, Window
from hvdtrain.training_plan import Progress
from hvdtrain.workers.wire_types import travels
from hvdtrain.workers.world import TrainingPosition


class StepEnd(IntEnum):
    """What of a step's end is done: the step alone; its evaluation, and what follows from that; its save."""

    STEPPED, JUDGED, SAVED = range(3)


@travels
@dataclass
class RunState:
    """Where a run stands, in addition to model and optimizer."""

    progress: Progress = field(default_factory=Progress)  # steps and samples done
    window: Window = field(default_factory=Window)  # the steps since the last logged line
    last_eval: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    last_eval_step: int | None = None  # when it was; None before the first
    seconds_before: float = 0.0  # time that was spent training before this process
    # how long there was no improvement; None if the run does not stop early
    early_stopping: EarlyStoppingState | None = None
    # what the learning rate was lowered to; None if its schedule is another than plateau
    plateau: PlateauState | None = None
    best_value: float | None = None  # value of the metric that keep_best names, of the best checkpoint so far
    tracking_id: str | None = None  # the run's name among trackers; None if no tracker has it
    changes: int = 0  # how often the workers of an elastic job changed while this job trained
    paused_seconds: float = 0.0  # the time without training that this took
    last_step: StepInfo | None = None  # the last step that this job did; None before it did one
    step_end: int = StepEnd.SAVED  # what of the end of that step is done, or was not due
    # whether callbacks were called to find whether training ends, and this worker does not have their answer,
    # as a peer was lost
    awaits_answer: bool = False
    save_is_due: bool = False  # whether the state must be saved before the next step
    saved_step: int | None = None  # when the state was last copied to be written

    @property
    def place(self) -> TrainingPosition:
        """Where training stands, as the driver of an elastic job compares it."""
        return (
            TrainingPosition(self.progress.step, self.step_end) if self.progress.step else TrainingPosition()
        )

    @property
    def is_unfinished(self) -> bool:
        """Whether something that is due after the last step is not done."""
        return self.last_step is not None and (
            self.step_end < StepEnd.SAVED or self.save_is_due or self.awaits_answer
        )

    @classmethod
    def from_manifest(
        cls, manifest: Manifest | None, config: Config, best_value: float | None = None
    ) -> "RunState":
        """Return the state that a checkpoint kept, or that of a new run without one."""
        if manifest is None:
            return cls(
                early_stopping=early_stopping_from(config.early_stopping, None),
                plateau=plateau_from(config.plateau_goal, None),
                best_value=best_value,
            )
        weight = manifest.window_weight
        return cls(
            progress=Progress(manifest.step, manifest.samples),
            window=Window(
                _with_nan(manifest.window),
                weight,
                untimed_weight=weight,
                weights=dict(manifest.window_weights),
                bad_samples=manifest.window_bad_samples,
            ),
            last_eval=_with_nan(manifest.last_metrics),
            last_eval_step=manifest.step if manifest.metrics else None,
            seconds_before=manifest.seconds,
            early_stopping=early_stopping_from(config.early_stopping, manifest.waiting),
            plateau=plateau_from(config.plateau_goal, manifest.plateau),
            best_value=best_value,
            tracking_id=manifest.tracking_id,
        )


def _with_nan(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return numbers that came through JSON; NaN for one that was not finite."""
    return {name: math.nan if value is None else value for name, value in values.items()}
