"""Where a world of an elastic job starts from if none of its workers has a state that is whole."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.callbacks import RunContext
from hvdtrain.checkpoints.storage import checkpoints_in
from hvdtrain.data.eval_sets import sets_of
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.jobs.training_run import TrainingRun, find_start
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE, Report, SilentReport
from hvdtrain.reporting.run_report import CallbackReport
from hvdtrain.session import Session
from hvdtrain.training_plan import Progress
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import run_on_rank_zero
from hvdtrain.workers.seeding import random_state_kept
from hvdtrain.workers.world import World


def start_of(
    run: TrainingRun, world: World, known: Path | None, check_as_built: Callable[[], None] = lambda: None
) -> tuple[TrainingRun, ResumePoint]:
    """Collective. Find where a world starts from, and load it into every worker.

    A world that starts anew after one that was lost takes the run directory that was begun; one that starts
    from a checkpoint takes the newest of its run directory. If all workers that knew that directory are lost,
    the driver has its path.

    Args:
        run: the training.
        world: the world, whose source is not "root".
        known: the run directory, if this worker knows that it is this job's.
        check_as_built: as ``restore`` takes it.

    Returns:
        The training with the config that leads there, and the start.
    """
    workers, config = run.backend.workers, run.config
    paths = [text for text in workers.allgather_object("" if known is None else str(known)) if text]
    paths += [world.run_dir] if world.run_dir else []
    path = paths[0] if paths else config.run_dir
    is_own = bool(paths) or (world.source == "checkpoint" and path is not None)

    def look() -> tuple[bool, bool]:
        folder = Path(path or "")
        has_saved = is_own and bool(checkpoints_in(folder / CHECKPOINTS))
        return has_saved, is_own or (world.generation > 1 and path is not None and _is_untouched(folder))

    has_saved, is_begun = run_on_rank_zero(workers, look)
    changes: dict[str, Any] = {"run_dir": path, **({"resume": "auto"} if has_saved else {})}
    run = replace(run, job=replace(run.job, config=config.model_copy(update=changes)), hosts=_hosts(world))
    point = find_start(run, check_as_built)
    if is_begun and point.resumed_step is None:
        point = replace(point, resumed_step=0)
    if world.source == "checkpoint" and not has_saved:
        lost = f"no worker has the state of training any more; {path} has no checkpoint: training starts anew"
        point = replace(point, notes=(*point.notes, lost))
    return run, point


def _is_untouched(folder: Path) -> bool:
    """Return whether a run directory was made by a run that has written nothing yet."""
    log = folder / METRICS_FILE
    if any((folder / name).exists() for name in (SUMMARY_FILE, CHECKPOINTS)):
        return False
    return log.is_file() and log.stat().st_size == 0


def _hosts(world: World) -> list[str]:
    return [member.host for member in world.members]


def report_of_others(context: RunContext, callbacks: Sequence[Any]) -> Report:
    """Return the report of another rank than 0."""
    own = [callback for callback in callbacks if getattr(callback, "every_rank", False)]
    return CallbackReport(context, own) if own else SilentReport()


def warm_up(session: Session) -> None:
    """Compile the steps before the others wait for this worker. Local: it is alone."""
    ACTIVITY.enter("compiling the steps", is_long=True)
    plan = session.plan()
    batch = session.train_batch(plan, Progress())
    if batch is not None:
        first = next(iter(sets_of(session.eval_data)), None)
        eval_batch = None if first is None else session.eval_batch(plan, first)
        with random_state_kept():  # a task's own code may draw from Python's and numpy's generators
            session.backend.warm_up(batch, eval_batch)
