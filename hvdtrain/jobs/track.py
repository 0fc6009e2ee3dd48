"""The command ``track``: it sends what trackers do not have of runs that are over, or were never tracked."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints import storage
from hvdtrain.config.values import TRACKERS, check_installed, senders, split_trackers
from hvdtrain.errors import EnvironmentFault, HvdtrainError, UsageError
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.reporting.file_access import access_remedy
from hvdtrain.reporting.run_status import RUNNING
from hvdtrain.reporting.stored_runs import StoredRun, find_runs, read_run
from hvdtrain.trackers.sender import Sender, describe_error, read_tracked_run


def track_runs(
    run_dirs: Sequence[Path], names: Sequence[str], with_checkpoints: bool, say: Callable[[str], None]
) -> None:
    """Send runs to trackers.

    Args:
        run_dirs: their directories, or folders of them.
        names: the trackers; those of the run's config if none is given.
        with_checkpoints: whether to send the newest checkpoint, too.
        say: shows a line of text.

    Raises:
        UsageError: If a directory holds no run, or no tracker is named.
        EnvironmentFault: If a directory cannot be read or written, or a tracker refuses what it is sent.
    """
    paths, notes = find_runs(run_dirs)
    for note in notes:
        say(f"note: {note}")
    for run in map(read_run, paths):
        for name in _trackers_for(run, names):
            _send(run, name, with_checkpoints, say)


def _trackers_for(run: StoredRun, names: Sequence[str]) -> list[str]:
    """Return the trackers to send a run to.

    Raises:
        UsageError: If none is named, or one that nothing is sent to.
    """
    try:
        found: Any = split_trackers(list(names) or run.config.get("track") or [])
    except ValueError as error:
        raise UsageError(f"{'--to' if names else run.path}: {error}") from None
    if names and (others := [name for name in found if not TRACKERS[name].has_sender]):
        raise UsageError(
            f"--to {others[0]}: {TRACKERS[others[0]].title} reads the files in the run directory, nothing is "
            "sent",
            f"tensorboard --logdir {run.path}",
        )
    if not isinstance(found, tuple) or not (chosen := senders(found)):
        known = " or --to ".join(senders(TRACKERS))
        raise UsageError(f"{run.path}: the run's config names no tracker", f"Add --to {known}.")
    check_installed(chosen)
    return chosen


def _send(run: StoredRun, name: str, with_checkpoints: bool, say: Callable[[str], None]) -> None:
    """Send what is left of a run, and how it ended if it did.

    Raises:
        EnvironmentFault: If it cannot be sent now.
    """
    title, path = TRACKERS[name].title, run.path
    if run.status == RUNNING:
        raise EnvironmentFault(
            f"{title}: a job trains {path} now",
            "With --track it sends the run by itself. Otherwise give this command when it has ended.",
        )
    try:
        read_tracked_run(path)  # which is given a name
        sender = Sender(path, name)
    except OSError as error:
        remedy = access_remedy(error, path, writes=True)
        raise EnvironmentFault(f"{title}: {path} cannot be sent: {error}", remedy) from None
    if with_checkpoints:
        sender.checkpoint = next(reversed(storage.checkpoints_in(path / CHECKPOINTS)), None)
    try:
        if run.may_train:
            sender.send()
        else:
            sender.end(run.status, str((run.summary or {}).get("error") or ""))
    except HvdtrainError:
        raise
    except Exception as error:
        remedy = "What was sent until then is noted; the same command sends the rest."
        raise EnvironmentFault(f"{title}: {describe_error(error)}", remedy) from None
    finally:
        for note in sender.take_notes():
            say(note)
    say(f"{title}: {path} is sent; this run is {sender.place}")
    if run.may_train:
        say(f"{title}: {path} has not ended, as far as can be seen here; give this command again then")
