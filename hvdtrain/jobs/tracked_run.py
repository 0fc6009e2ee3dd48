"""The trackers of a job: the run's name among them, and what they are sent of the job."""

import shlex
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config import Config
from hvdtrain.config.values import senders
from hvdtrain.host.launcher import host_name
from hvdtrain.jobs.run_directory.provenance import Provenance, provenance_of
from hvdtrain.paths import run_folder
from hvdtrain.reporting.run_report import Reporter
from hvdtrain.workers.agreement import Workers, run_on_rank_zero


def agree_on_id(config: Config, workers: Workers, known: str | None, in_place: bool) -> str | None:
    """Collective if the run is tracked. Return its name among trackers, the same on all workers.

    Args:
        config: the resolved config.
        workers: the workers.
        known: the name that the checkpoint has which the run goes on from.
        in_place: whether the run goes on in its directory.

    Returns:
        The name; one that is known stays, also if this job is not tracked.
    """
    if known is not None or not config.track:
        return known

    def choose() -> str:
        from hvdtrain.trackers.sender import read_id  # most jobs do without

        found = read_id(run_folder(config.run_dir)) if in_place and config.run_dir else None
        return found or uuid.uuid4().hex

    return run_on_rank_zero(workers, choose)


def trackers_of(
    config: Config,
    tracking_id: str | None,
    hosts: Sequence[str],
    changes: Sequence[str] = (),
    *,
    origin: str = "",
    done: int | None = None,
    provenance: Provenance | None = None,
) -> Callable[[Path], Sequence[Reporter]]:
    """Return what makes the callback that has the run sent; it makes none if no tracker is sent anything.

    Args:
        config: the resolved config.
        tracking_id: the run's name among trackers.
        hosts: the host of each worker, as far as they are known.
        changes: descriptions of what differs from the run's last job.
        origin: a description of the checkpoint that the run continues from.
        done: steps that are done, if the job does not begin here.
        provenance: where this start of the run comes from; it is found out if it is None.
    """
    names = senders(config.track)
    if not names or tracking_id is None:
        return lambda run_dir: ()

    def make(run_dir: Path) -> Sequence[Reporter]:
        from hvdtrain.trackers.sender import JobTracking, Sender

        own = provenance or provenance_of(config, hosts, {}, is_instance=False)
        facts: dict[str, Any] = {"hosts": list(hosts) or [host_name()], **_facts_of(own)}
        facts |= {"changes": list(changes)} if changes else {}
        facts |= {"resumed_from": origin} if origin else {}
        facts |= {"step": done} if done is not None else {}
        made = [Sender(run_dir, name) for name in names]
        return [JobTracking(made, run_dir, tracking_id, facts, config.track_checkpoints)]

    return make


def _facts_of(provenance: Provenance) -> dict[str, str]:
    """Return what trackers are sent of a job's code."""
    facts = {"command": shlex.join(provenance.command)}
    if provenance.task_file is not None:
        facts |= {"task_file": str(provenance.task_file), "task_sha256": provenance.sha256}
    if provenance.git.commit:
        state = {True: "yes", False: "no", None: "unknown"}[provenance.git.is_dirty]
        facts |= {"commit": provenance.git.commit, "uncommitted_changes": state}
    return facts
