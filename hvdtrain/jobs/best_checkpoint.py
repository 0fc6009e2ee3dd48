"""Which of a run's checkpoints a caller from Python means: the newest, or the best."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints import storage, verification
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.checkpoints.remote.fetched import manifests_in
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import CheckpointError, EnvironmentFault, UsageError
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS


def chosen_checkpoint(path: Path | str, best: bool | str) -> Path | str:
    """Return the path to look for a checkpoint at. Local: no collective.

    Args:
        path: a checkpoint, or a run; or the URL of one.
        best: whether to take the best checkpoint of the run, and by which metric: True for the one that the
            run kept the best of, or else the loss.

    Returns:
        ``path``, or the directory of the best checkpoint in it; of equal ones the first.

    Raises:
        UsageError: If ``best`` is no metric.
        CheckpointError: If no checkpoint there has an evaluation with that metric.
    """
    if not best:
        return path
    manifests = _manifests_in(path)
    goal = _goal(best, next(reversed([*manifests.values()]), None))
    value: float | None = None
    found: Path | str | None = None
    for candidate, manifest in manifests.items():
        if goal.improves(manifest.metrics.get(goal.metric), value):
            value, found = manifest.metrics[goal.metric], candidate
    if found is None:
        names = sorted({name for manifest in manifests.values() for name in manifest.metrics})
        raise CheckpointError(
            f"best: no checkpoint in {path} has an evaluation with the metric {goal.metric!r}",
            f"Metrics that they have: {', '.join(names)}."
            if names
            else "A checkpoint has one if it was saved at a step with an evaluation; keep_best saves those.",
        )
    return found


def _manifests_in(path: Path | str) -> Mapping[Any, Manifest]:
    """Return what the checkpoints of a run say of themselves, the newest last; damaged ones are left out."""
    if isinstance(path, str):
        return manifests_in(path)
    try:
        paths = [*storage.checkpoints_in(path / CHECKPOINTS), *storage.checkpoints_in(path)]
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {error.strerror or error}") from None
    found = {one: verification.read_manifest(one) for one in paths}
    return {one: manifest for one, manifest in found.items() if manifest is not None}


def _goal(best: bool | str, newest: Manifest | None) -> MetricGoal:
    """Return the metric that says which checkpoint is best.

    Raises:
        UsageError: If it is none.
    """
    if best is True:
        best = str((newest and newest.config.get("keep_best")) or "loss")
    if not isinstance(best, str):
        raise UsageError(f"best must be True, False or the name of a metric, found {best!r}")
    try:
        return MetricGoal.parse(best)
    except ValueError as error:
        raise UsageError(f"best={best!r}: {error}") from None
