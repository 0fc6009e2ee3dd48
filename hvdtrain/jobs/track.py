"""Trackers: those of a job, and the command ``track``, which sends them what they do not have of runs."""

import shlex
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.checkpoints import storage
from hvdtrain.config import Config
from hvdtrain.config.values import TRACKERS, check_installed, senders, split_trackers
from hvdtrain.errors import EnvironmentFault, HvdtrainError, UsageError
from hvdtrain.host.launcher import host_name
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.jobs.run_directory.provenance import Provenance, provenance_of
from hvdtrain.reporting.stored_runs import RUNNING, StoredRun, access_remedy, find_runs, read_run
from hvdtrain.storage.files import run_folder
from hvdtrain.trackers.sender import JobTracking, Sender, describe_error, read_id, read_tracked_run
from hvdtrain.workers.agreement import Workers, run_on_rank_zero


def agree_on_id(config: Config, workers: Workers, known: str | None, in_place: bool) -> str | None:
    """Collective if the run is tracked. Return its name among trackers, the same on all workers."""
    # A name that is known stays, also if this job is not tracked.
    if known is not None or not config.track:
        return known

    def choose() -> str:
        found = read_id(run_folder(config.run_dir)) if in_place and config.run_dir else None
        return found or uuid.uuid4().hex

    return run_on_rank_zero(workers, choose)


def trackers_of(
    config: Config,
    run_dir: Path,
    tracking_id: str | None,
    *,
    hosts: Sequence[str] = (),
    provenance: Provenance | None = None,
    **more: Any,
) -> list[JobTracking]:
    """Return the callback that has the run sent, with ``more`` facts; none if no tracker is sent anything."""
    names = senders(config.track)
    if not names or tracking_id is None:
        return []
    code = provenance or provenance_of(config, hosts, {}, is_instance=False)
    facts: dict[str, Any] = {"framework": config.framework, "hosts": list(hosts) or [host_name()]}
    facts["command"] = shlex.join(code.record["command"])
    if code.task_file:
        facts |= {"task_file": code.task_file["path"], "task_sha256": code.task_file["sha256"]}
    if commit := code.record["commit"]:
        state = {True: "yes", False: "no", None: "unknown"}[code.record["dirty"]]
        facts |= {"commit": commit, "uncommitted_changes": state}
    facts |= {name: value for name, value in more.items() if value not in ([], "")}
    return [JobTracking(names, run_dir, tracking_id, facts, config.track_checkpoints)]


def track_runs(
    run_dirs: Sequence[Path], names: Sequence[str], with_checkpoints: bool, say: Callable[[str], None]
) -> None:
    """Send runs to trackers."""
    paths, notes = find_runs(run_dirs)
    for note in notes:
        say(f"note: {note}")
    for run in map(read_run, paths):
        try:
            found: Any = split_trackers(list(names) or run.config.get("track") or [])
        except ValueError as error:
            raise UsageError(f"{'--to' if names else run.path}: {error}") from None
        chosen = senders(found) if isinstance(found, tuple) else []
        if names and len(chosen) < len(found):
            remedy = f"tensorboard --logdir {run.path}"
            raise UsageError("--to tensorboard: TensorBoard reads the files itself, nothing is sent", remedy)
        if not chosen:
            known = " or --to ".join(senders(TRACKERS))
            raise UsageError(f"{run.path}: the run's config names no tracker", f"Add --to {known}.")
        check_installed(chosen)
        for name in chosen:
            _send(run, name, with_checkpoints, say)


def _send(run: StoredRun, name: str, with_checkpoints: bool, say: Callable[[str], None]) -> None:
    """Send what is left of a run, and how it ended if it did."""
    title, path = TRACKERS[name].title, run.path
    if run.status == RUNNING:
        raise EnvironmentFault(
            f"{title}: a job trains {path} now",
            "With --track it sends the run by itself. Otherwise give this command when it has ended.",
        )
    try:
        read_tracked_run(path)  # which is given a name
        sender = Sender(path, name, say)
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
    say(f"{title}: has all of {path}")
    if run.may_train:
        say(f"{title}: {path} has not ended, as far as can be seen here; give this command again then")
