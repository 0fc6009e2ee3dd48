"""The trials of a sweep, for a page. They are read from a copy of its study: nothing is written beside it.

Optuna, which keeps them, is imported here, if a folder has a study.
"""

import math
import sqlite3
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.early_stopping import MetricGoal
from hvdtrain.regular_files import read_regular
from hvdtrain.reporting.stored_runs import holds_run, number_text, plain, read_run, value_text
from hvdtrain.run_views.page_tables import PageTable

_DATABASE, _JOURNAL = "study.db", "study.journal"
_MAX_BYTES = 1 << 30
_WAIT_SECONDS = 10.0  # for a sweep that writes
_STATES = {"COMPLETE": "completed", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True)
class SweepOnPage:
    """What a page shows of a sweep.

    Attributes:
        name: its folder's name.
        best: the best trial until now, in words.
        trials: a row for each trial, in the order in which they began.
        importance: how much each field matters, as Optuna estimates it; None if it cannot.
        problem: why its trials are not shown; empty if they are.
    """

    name: str
    best: str = ""
    trials: PageTable | None = None
    importance: PageTable | None = None
    problem: str = ""


def sweeps_among(paths: Sequence[Path]) -> list[SweepOnPage]:
    """Return the sweeps among folders; what is wrong with one is said in its place."""
    return [_read(path) for path in paths if any((path / name).is_file() for name in (_DATABASE, _JOURNAL))]


def _read(folder: Path) -> SweepOnPage:
    name = plain(folder.resolve().name)
    if find_spec("optuna") is None:
        return SweepOnPage(
            name,
            problem="its trials are not shown: optuna is not installed; "
            "python -m pip install 'hvdtrain[search]'",
        )
    try:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-report-") as copies:
            return _sweep_of(folder, name, _study_of(folder, Path(copies)))
    except Exception as error:  # Optuna's own, its database's, or of a file that somebody else wrote
        return SweepOnPage(name, problem=plain(f"its study cannot be read: {type(error).__name__}: {error}"))


def _study_of(folder: Path, copies: Path) -> Any:
    """Return the study of a sweep, from a copy as of now."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    storage: Any
    if (folder / _DATABASE).is_file():
        copy = copies / _DATABASE
        address = f"{(folder / _DATABASE).resolve().as_uri()}?mode=ro"
        with (
            closing(sqlite3.connect(address, uri=True, timeout=_WAIT_SECONDS)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
        storage = optuna.storages.RDBStorage(f"sqlite:///{copy}")
    else:
        lines = read_regular(folder / _JOURNAL, _MAX_BYTES)
        copy = copies / _JOURNAL
        copy.write_bytes(lines[: lines.rfind(b"\n") + 1])  # the last line may be being written
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(copy)))
    return optuna.load_study(study_name=optuna.get_all_study_names(storage)[0], storage=storage)


def _sweep_of(folder: Path, name: str, study: Any) -> SweepOnPage:
    goal = _goal_of(study)
    trials = [one for one in study.get_trials(deepcopy=False) if one.state.name != "WAITING"]
    fields = list(dict.fromkeys(field for one in trials for field in one.params))
    head = ["trial", "state", goal.metric, "best so far", *map(plain, fields), "steps", "seconds", "reason"]
    rows, best, best_number = [], math.nan, -1
    for one in trials:
        value = one.value if one.state.name in ("COMPLETE", "PRUNED") else None
        is_better = value is not None and (best_number < 0 or goal.improves(value, best))
        if one.state.name == "COMPLETE" and value is not None and is_better:
            best, best_number = value, one.number
        so_far = "" if best_number < 0 else number_text(best, ".4g")
        values = [_shown(one.params.get(field)) for field in fields]
        notes = [_shown(one.user_attrs.get(note)) for note in ("steps", "seconds", "reason")]
        rows.append([f"{one.number}", _state_of(folder, one), _shown(value), so_far, *values, *notes])
    text = "no trial has run to its end yet"
    if best_number >= 0:
        text = f"best until now: trial {best_number} (trial-{best_number:04d}), {goal.metric} {best:.4g}"
    return SweepOnPage(name, text, PageTable(head, rows), _importance_of(study))


def _goal_of(study: Any) -> MetricGoal:
    kept: Mapping[str, Any] = study.user_attrs.get("sweep") or {}
    try:
        return MetricGoal.parse(plain(str(kept.get("metric", "value"))))
    except ValueError:
        return MetricGoal("value", study.direction.name == "MAXIMIZE")


def _state_of(folder: Path, trial: Any) -> str:
    """Return how a trial ended; of one that did not, how its run stands."""
    if trial.state.name in _STATES:
        return _STATES[trial.state.name]
    run = folder / f"trial-{trial.number:04d}"
    return read_run(run).status if holds_run(run) else "unknown"


def _shown(value: Any) -> str:
    return number_text(value, ".4g") if isinstance(value, float) else value_text(value)


def _importance_of(study: Any) -> PageTable | None:
    import optuna

    finished = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len({one.value for one in finished}) < 2:
        return None
    try:
        found = optuna.importance.get_param_importances(study)
    except (ValueError, RuntimeError, ImportError):
        return None
    rows = [[plain(name), f"{share:.2f}"] for name, share in found.items()]
    return PageTable(["field", "importance"], rows)
