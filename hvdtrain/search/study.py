"""The study of a sweep: what Optuna keeps of its trials, in a file of the sweep's folder."""

import json
import math
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hvdtrain.errors import EnvironmentFault, HvdtrainError, UsageError
from hvdtrain.search.space import Dimension, grid_points
from hvdtrain.search.sweep_plan import SweepPlan

_NAME = "sweep"
_IDENTITY = "sweep"
_FILES = {"sqlite": "study.db", "journal": "study.journal"}
_WAIT_SECONDS = 60  # for another process that writes the file
MOST_DEATHS = 3
UNFINISHED = (TrialState.RUNNING, TrialState.WAITING)


def quiet_optuna() -> None:
    """Keep Optuna from logging each trial, and from warning of what it calls experimental."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def storage_of(folder: Path, kind: str) -> Any:
    """Return Optuna's storage in a sweep's folder.

    Args:
        folder: the folder.
        kind: "sqlite" or "journal".
    """
    path = folder.resolve() / _FILES[kind]
    if kind == "journal":
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    return optuna.storages.RDBStorage(
        f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": _WAIT_SECONDS}}
    )


def pruner_of(name: str) -> Any:
    """Return Optuna's pruner of a name. It counts evaluations, from 1."""
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=5)
    if name == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=1, reduction_factor=3)
    return optuna.pruners.NopPruner()


def sampler_of(name: str, seed: int) -> Any:
    """Return Optuna's sampler of a name; the points of a grid are put into the study one by one."""
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return optuna.samplers.RandomSampler(seed=seed)


class StudyFault(EnvironmentFault):
    """The file of a study that was open can no longer be read or written."""


@contextmanager
def study_faults(plan: SweepPlan) -> Iterator[None]:
    """Return a context in which what Optuna raises, whose storages raise errors of many types, is named.

    Raises:
        StudyFault: If it raises something.
    """
    try:
        yield
    except HvdtrainError:
        raise
    except Exception as error:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not any(name.startswith("optuna.") for name in modules):
            raise
        path, said = plan.folder / _FILES[plan.storage], str(error).partition("\n")[0]
        raise StudyFault(
            f"the study {path} cannot be read or written any more: {type(error).__name__}: {said}",
            "The runs of the trials are whole. To continue the sweep, put a copy of that file back and start "
            "again; another --folder begins a new one.",
        ) from error


class SweepStudy:
    """The trials of a sweep.

    Args:
        plan: what the sweep does. Its folder exists and is locked.

    Raises:
        UsageError: If the folder has another sweep.
        EnvironmentFault: If its file cannot be read or written.
    """

    def __init__(self, plan: SweepPlan) -> None:
        quiet_optuna()
        self._plan = plan
        for kind, name in _FILES.items():
            if kind != plan.storage and (plan.folder / name).exists():
                raise UsageError(
                    f"{plan.folder} has a sweep with --storage {kind}", f"Continue it with --storage {kind}."
                )
        direction = "maximize" if plan.goal.highest else "minimize"
        try:
            self.study = optuna.create_study(
                study_name=_NAME,
                storage=storage_of(plan.folder, plan.storage),
                direction=direction,
                pruner=pruner_of(plan.pruner),
                sampler=sampler_of("random", 0),
                load_if_exists=True,
            )
            self._identify()
        except UsageError:
            raise
        except Exception as error:
            raise EnvironmentFault(
                f"the study in {plan.folder} cannot be opened: {type(error).__name__}: {error}",
                "Another --folder begins a new sweep.",
            ) from error

    def _identify(self) -> None:
        """Note what the sweep searches, or check that it searches the same as before.

        Raises:
            UsageError: If it does not.
        """
        own = json.loads(json.dumps(self._plan.identity))
        before = self.study.user_attrs.get(_IDENTITY)
        if before is None:
            self.study.set_user_attr(_IDENTITY, own)
            return
        differing = [name for name, value in own.items() if before.get(name) != value]
        if differing:
            what = ", ".join(_described(differing, before, own))
            raise UsageError(
                f"{self._plan.folder} has a sweep that differs in {what}",
                "Give the same options to continue it, or another --folder to begin a new one.",
            )

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials that have begun, in order."""
        return [one for one in self.study.get_trials(deepcopy=False) if one.state != TrialState.WAITING]

    def interrupted(self) -> list[FrozenTrial]:
        """Return the trials that had begun when the sweep ended; one without all its values is given up."""
        found = []
        for one in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if {dimension.name for dimension in self._plan.space} <= one.params.keys():
                found.append(one)
            else:
                self.fail(one.number, "the sweep ended while its values were chosen")
        return found

    def next(self) -> FrozenTrial | None:
        """Begin a trial and return it; None if there are as many as there should be.

        Its values depend on the seed, its number and what is known of the trials before, so that a sweep
        that was interrupted draws nothing twice.
        """
        trials = self.trials
        if len(trials) >= self._plan.trials:
            return None
        if self._plan.sampler == "grid" and not self._enqueue_point(trials):
            return None
        self.study.sampler = sampler_of(self._plan.sampler, self._plan.config.seed + len(trials))
        trial = self.study.ask()
        for one in self._plan.space:
            _suggest(trial, one)
        return self.trial(trial.number)

    def _enqueue_point(self, trials: Sequence[FrozenTrial]) -> bool:
        """Have the next trial take a point of the grid that none has; return whether there is one."""
        if self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return True  # of a sweep that was killed here
        had = {_key(one.params) for one in trials}
        point = next((one for one in grid_points(self._plan.space) if _key(one) not in had), None)
        if point is not None:
            self.study.enqueue_trial(point)
        return point is not None

    def trial(self, number: int) -> FrozenTrial:
        """Return a trial as it is now."""
        return next(one for one in self.trials if one.number == number)

    def attempt(self, trial: FrozenTrial) -> int:
        """Note that a trial is started, and return how often it has been."""
        return self._counted(trial.number, "attempts")

    def died(self, number: int) -> bool:
        """Note that a trial's job died, which the end of the sweep does not do; return whether too often."""
        return self._counted(number, "deaths") >= MOST_DEATHS

    def _counted(self, number: int, name: str) -> int:
        count = int(self.trial(number).user_attrs.get(name, 0)) + 1
        self._note(number, {name: count})
        return count

    def complete(self, number: int, value: float, notes: Mapping[str, Any]) -> None:
        """Keep the value of a trial that ran to its end."""
        self._note(number, notes)
        self.study.tell(number, value)

    def prune(self, number: int, notes: Mapping[str, Any]) -> None:
        """Keep that a trial was ended early."""
        self._note(number, notes)
        self.study.tell(number, state=TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """Keep that a trial failed, and why."""
        self._note(number, {"reason": reason})
        self.study.tell(number, state=TrialState.FAIL)

    def _note(self, number: int, notes: Mapping[str, Any]) -> None:
        trial_id = self.trial(number)._trial_id
        for name, value in notes.items():
            self.study._storage.set_trial_user_attr(trial_id, name, value)

    def importance(self) -> dict[str, float]:
        """Return how much each field matters for the metric, as Optuna estimates it; empty if it cannot."""
        values = {one.value for one in self.trials if one.state == TrialState.COMPLETE}
        if len(values) < 2:
            return {}
        try:
            return dict(optuna.importance.get_param_importances(self.study))
        except (ValueError, RuntimeError, ImportError):
            return {}


def _key(point: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return what is the same for equal points, whatever rounding has left of their steps."""
    return frozenset(
        (name, f"{value:.12g}" if isinstance(value, float) else str(value)) for name, value in point.items()
    )


def _suggest(trial: Any, one: Dimension) -> None:
    if one.choices:
        trial.suggest_categorical(one.name, one.labels)
    elif one.is_whole:
        trial.suggest_int(one.name, int(one.low), int(one.high), step=int(one.step or 1), log=one.log)
    else:
        trial.suggest_float(one.name, one.low, one.high, step=one.step, log=one.log)


def _described(names: list[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for name in names:
        if name == "config":
            fields = sorted({*before[name], *now[name]})
            found += [f"config {one}" for one in fields if before[name].get(one) != now[name].get(one)]
        elif name == "space":
            found.append("the space")
        else:
            found.append(f"{name} ({before.get(name)} before, {now[name]} now)")
    return found


def is_number(value: Any) -> bool:
    """Return whether a value can be that of a trial."""
    return isinstance(value, int | float) and math.isfinite(value)
