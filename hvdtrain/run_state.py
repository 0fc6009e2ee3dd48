"""What a run knows of itself that a checkpoint keeps, and how it is saved and restored."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.config import Config
from hvdtrain.data.fingerprint import Fingerprint
from hvdtrain.early_stopping import EarlyStoppingState, PlateauState, early_stopping_from, plateau_from
from hvdtrain.metrics import StepInfo, Window
from hvdtrain.reporting.jsonl import finite
from hvdtrain.schedule import Rescale
from hvdtrain.training_plan import Progress
from hvdtrain.workers.wire_types import travels
from hvdtrain.workers.world import Place


class StepEnd(IntEnum):
    """What of a step's end is done: the step alone; its evaluation, and what follows from that; its save."""

    STEPPED, JUDGED, SAVED = range(3)


@travels
@dataclass
class RunState:
    """Where a run stands, in addition to model and optimizer.

    Attributes:
        progress: steps and samples done.
        window: the steps since the last logged line.
        last_eval: metrics of the last evaluation.
        last_eval_step: when it was; None before the first.
        seconds_before: time that was spent training before this process.
        early_stopping: how long there was no improvement; None if the run does not stop early.
        plateau: what the learning rate was lowered to; None if its schedule is another than plateau.
        best_value: value of the metric that keep_best names, of the best checkpoint so far.
        workers: how many did the last step; 0 before the first.
        rescale: where the peak learning rate comes from since their number changed; None if it did not.
        tracking_id: the run's name among trackers; None if no tracker has it.
        changes: how often the workers of an elastic job changed while this job trained.
        paused_seconds: the time without training that this took.
        last_step: the last step that this job did; None before it did one.
        step_end: what of the end of that step is done, or was not due.
        awaits_answer: whether callbacks were called to find whether training ends, and this worker does not
            have their answer, as a peer was lost.
        save_is_due: whether the state must be saved before the next step.
        saved_step: when the state was last copied to be written.
    """

    progress: Progress = field(default_factory=Progress)
    window: Window = field(default_factory=Window)
    last_eval: dict[str, float] = field(default_factory=dict)
    last_eval_step: int | None = None
    seconds_before: float = 0.0
    early_stopping: EarlyStoppingState | None = None
    plateau: PlateauState | None = None
    best_value: float | None = None
    workers: int = 0
    rescale: Rescale | None = None
    tracking_id: str | None = None
    changes: int = 0
    paused_seconds: float = 0.0
    last_step: StepInfo | None = None
    step_end: int = StepEnd.SAVED
    awaits_answer: bool = False
    save_is_due: bool = False
    saved_step: int | None = None

    @property
    def place(self) -> Place:
        """Where training stands, as the driver of an elastic job compares it."""
        return Place(self.progress.step, self.step_end) if self.progress.step else Place()

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
        """Return the state that a checkpoint kept, or that of a new run without one.

        Args:
            manifest: the checkpoint's.
            config: the resolved config.
            best_value: value of the metric that keep_best names, of the best checkpoint there is.
        """
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
            workers=manifest.workers,
            rescale=manifest.rescale,
            tracking_id=manifest.tracking_id,
        )

    def to_manifest(
        self,
        config: Config,
        *,
        data_size: int,
        workers: int,
        versions: Mapping[str, str],
        seconds: float,
        data: Mapping[str, Fingerprint],
        trained: dict[str, list[str]] | None = None,
    ) -> Manifest:
        """Return what a checkpoint that is made now keeps.

        Args:
            config: the resolved config.
            data_size: samples in the training data.
            workers: number of workers.
            versions: versions of what trained, by name.
            seconds: time spent training, that of earlier processes included.
            data: fingerprints of the data, by the task's method.
            trained: what is trained, if that is not what the model was made with.
        """
        evaluated_now = self.last_eval_step == self.progress.step
        return Manifest(
            step=self.progress.step,
            samples=self.progress.samples,
            data_size=data_size,
            seconds=seconds,
            workers=workers,
            config=config.model_dump(mode="json"),
            versions=dict(versions),
            metrics=finite(self.last_eval) if evaluated_now else {},
            last_metrics=finite(self.last_eval),
            window=finite(self.window.sums),
            window_weight=self.window.weight,
            window_weights=self.window.weights,
            window_bad_samples=self.window.bad_samples,
            waiting=self.early_stopping,
            plateau=self.plateau,
            rescale=self.rescale,
            tracking_id=self.tracking_id,
            data=dict(data),
            trained=trained,
        )


def _with_nan(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return numbers that came through JSON; NaN for one that was not finite."""
    return {name: math.nan if value is None else value for name, value in values.items()}
