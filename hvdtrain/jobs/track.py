"""The command ``track``: it sends what trackers do not have of runs that are over, or were never tracked."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.regular_files import read_regular
from hvdtrain.reporting.file_access import access_remedy, refused_file
from hvdtrain.reporting.run_status import UNKNOWN
from hvdtrain.reporting.stored_runs import FILES, StoredRun, read_run
from hvdtrain.trackers import TRACKERS, check_installed, senders, split_trackers
from hvdtrain.tracking.loading import LOADERS, tracked_run
from hvdtrain.tracking.process import describe_error
from hvdtrain.tracking.sender import Sender
from hvdtrain.tracking.sender_lock import lock_file, take

_MAX_BYTES = 1 << 22


def track_runs(
    run_dirs: Sequence[Path], names: Sequence[str], with_checkpoints: bool, say: Callable[[str], None]
) -> None:
    """Send runs to trackers.

    Args:
        run_dirs: their directories.
        names: the trackers; those of the run's config if none is given.
        with_checkpoints: whether to send the newest checkpoint, too.
        say: shows a line of text.

    Raises:
        UsageError: If a directory holds no run, or no tracker is named.
        EnvironmentFault: If a directory cannot be read or written, or a tracker refuses what it is sent.
    """
    for run_dir in run_dirs:
        try:
            if (refused := refused_file(run_dir, FILES)) is not None:
                raise refused
        except OSError as error:
            raise EnvironmentFault(
                f"cannot read the run {run_dir}: {error}", access_remedy(error, run_dir)
            ) from None
        for name in _names_for(run_dir, names):
            _send(run_dir, name, with_checkpoints, say)


def _names_for(run_dir: Path, names: Sequence[str]) -> list[str]:
    """Return the trackers to send a run to.

    Raises:
        UsageError: If none is named, or one that nothing is sent to.
    """
    try:
        found: Any = split_trackers(list(names)) if names else _of_config(run_dir)
    except ValueError as error:
        raise UsageError(f"--to: {error}") from None
    for name in found:
        if names and not TRACKERS[name].has_sender:
            raise UsageError(
                f"--to {name}: {TRACKERS[name].title} reads the files in the run directory, nothing is sent",
                f"tensorboard --logdir {run_dir}",
            )
    if not (chosen := senders(found)):
        raise UsageError(
            f"{run_dir}: the run's config names no tracker", f"Add --to {' or --to '.join(LOADERS)}."
        )
    check_installed(chosen)
    return chosen


def _of_config(run_dir: Path) -> list[str]:
    try:
        config = yaml.safe_load(read_regular(run_dir / "config.yaml", _MAX_BYTES))
        names = split_trackers(config.get("track") or [])
    except (OSError, yaml.YAMLError, ValueError, AttributeError, RecursionError):
        return []
    return list(names) if isinstance(names, tuple) else []


def _send(run_dir: Path, name: str, with_checkpoints: bool, say: Callable[[str], None]) -> None:
    title = TRACKERS[name].title
    try:
        run = tracked_run(run_dir)
        with lock_file(run_dir, name) as lock:
            if not take(lock):
                raise EnvironmentFault(
                    f"{title}: another process sends {run_dir} now", "The job that trains does it by itself."
                )
            sender = Sender(run, name, LOADERS[name], with_checkpoints)
            stored = read_run(run_dir)
            _send_all(sender, stored, title)
            for note in sender.notes():
                say(f"{title}: {note}")
    except OSError as error:
        remedy = access_remedy(error, run_dir, writes=True)
        raise EnvironmentFault(f"{title}: {run_dir} cannot be sent: {error}", remedy) from None
    say(f"{title}: {run_dir} is sent; {sender.state.where()}")
    if stored.may_train:
        seen = ", whether a job trains it cannot be seen here" if stored.status == UNKNOWN else ""
        say(f"{title}: {run_dir} has not ended{seen}; its end is sent by its job, or by this command then")


def _send_all(sender: Sender, run: StoredRun, title: str) -> None:
    """Send what is left, and how the run ended if it did.

    Raises:
        EnvironmentFault: If the tracker does not take it.
    """
    try:
        if run.may_train:
            sender.round()
        else:
            sender.end(run.status)
    except Exception as error:
        raise EnvironmentFault(
            f"{title}: {describe_error(error)}",
            "What was sent until then is noted; the same command goes on.",
        ) from None
