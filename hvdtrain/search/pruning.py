"""What a trial tells its study: the metric after each evaluation, and whether it is worth going on."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.callbacks import Callback, RunContext
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import ConfigError
from hvdtrain.metrics import StepInfo
from hvdtrain.schedule import Cadence

PRUNED = "pruned"


class StudyCallback(Callback):
    """Tells the study of a sweep each evaluation, and ends the trial if the study's pruner says so.

    Rank 0 asks the study, and all workers get its answer before the next step.

    Args:
        folder: the sweep's folder.
        storage: "sqlite" or "journal".
        pruner: "none", "median", "asha" or "hyperband".
        number: the trial's number.
        goal: the metric.
    """

    errors_end_job = False  # a study that cannot be written must not end a trial that trains

    def __init__(self, folder: Path, storage: str, pruner: str, number: int, goal: MetricGoal) -> None:
        self._folder, self._storage, self._pruner = folder, storage, pruner
        self._number, self._goal = number, goal
        self._every: Cadence | None = None
        self._data_size = 1
        self._trial: Any = None

    def on_start(self, context: RunContext) -> None:
        """Keep what counts evaluations."""
        self._every, self._data_size = context.config.eval_every, len(context.train_data)

    def should_stop(self, step: StepInfo, metrics: Mapping[str, float]) -> str:
        """Tell the study of an evaluation; return why the trial ends, if it does."""
        if self._goal.metric not in metrics or not math.isfinite(metrics[self._goal.metric]):
            return ""  # the end of the trial tells
        value, count = metrics[self._goal.metric], evaluations_at(self._every, step, self._data_size)
        trial = self._opened()
        trial.report(value, count)
        if not trial.should_prune():
            return ""
        return f"{PRUNED}: {self._goal.metric} {value:.4g} after evaluation {count} ({self._pruner})"

    def _opened(self) -> Any:
        """Return the trial in the study, which is opened at the first evaluation."""
        if self._trial is None:
            import optuna

            from hvdtrain.search.study import pruner_of, quiet_optuna, sampler_of, storage_of

            quiet_optuna()
            study = optuna.load_study(
                study_name="sweep",
                storage=storage_of(self._folder, self._storage),
                pruner=pruner_of(self._pruner),
                sampler=sampler_of("random", 0),
            )
            found = next(one for one in study.get_trials(deepcopy=False) if one.number == self._number)
            self._trial = optuna.trial.Trial(study, found._trial_id)
        return self._trial


def evaluations_at(every: Cadence | None, step: StepInfo, data_size: int) -> int:
    """Return how many evaluations there have been, which trials with other batches have in common.

    It depends on where training stands alone, so that a trial that resumes does not count twice.

    Raises:
        ConfigError: If there is no interval.
    """
    if every is None:
        raise ConfigError("eval_every is null: there are no evaluations before the end")
    if every.unit == "steps":
        return max(1, step.step // int(every.every))
    return max(1, math.floor(step.samples / (every.every * data_size) + 1e-9))
