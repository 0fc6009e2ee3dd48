"""Starting a job: its backend, with workers that are watched and agree on config and versions."""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from hvdtrain.backends import load_backend
from hvdtrain.backends.base import Backend
from hvdtrain.backends.pipeline.groups import Layout
from hvdtrain.backends.start import forbid_restart
from hvdtrain.config import Config
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.elastic.watch.liveness import Watching, WatchLimits, silence_seconds
from hvdtrain.elastic.watch.worker_watch import WorkerWatch, watch_workers
from hvdtrain.errors import (
    HvdtrainError,
    PeerLostError,
    UsageError,
)
from hvdtrain.host.launcher import (
    is_elastic,
)
from hvdtrain.jobs.failures import (
    do_in_time,
    end_at_once,
    expect_answer,
    is_debugging,
    is_shared,
    leave_open,
    name_lost_worker,
)
from hvdtrain.jobs.opening.prepare import JobSpec
from hvdtrain.jobs.signals import Signals
from hvdtrain.session import versions_with
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import assert_consistent

_FIRST_ANSWER_SECONDS = 30


@contextmanager
def started(
    job: JobSpec,
    signals: Signals,
    watching: Watching | None = None,
    membership: Membership | None = None,
    *,
    stays: bool = False,
    ranks: Sequence[int] = (),
) -> Iterator[Backend]:
    """Collective. Return a context with the job's backend, in which the job's workers are watched.

    After a good end Horovod stays: a script may train again, and MPI starts only once.

    Args:
        job: the job.
        signals: what signals asked of this worker.
        watching: what is done before the process ends because a worker does not answer.
        membership: this worker's part in an elastic job, whose driver watches the workers; None in others.
        stays: whether Horovod also stays after an error that all workers have.
        ranks: the ranks of MPI that make up the job, if others run something else; empty for all.

    Raises:
        UsageError: If the launcher started an elastic job, and what this process does cannot be elastic.
    """
    check_may_be_elastic(membership)
    ACTIVITY.enter("starting", is_long=True)  # what an earlier training did last is long ago
    watching = watching or Watching()
    backend = load_backend(job.config, membership, ranks)
    ACTIVITY.part = _part_of(job.config, backend)
    try:
        with nullcontext() if membership else _watched(job, backend, watching):
            if membership is not None:
                watching.explain = membership.explain
            try:
                yield backend
            except PeerLostError as error:
                raise name_lost_worker(error, watching.explain) from error
    except BaseException as error:
        signals.ignore()  # how this ends is settled
        if stays and membership is None and is_shared(error, backend.workers):
            leave_open(backend.close)
            raise
        if membership is not None and isinstance(error, HvdtrainError):
            membership.failed(error)  # the others need not wait
        do_in_time(backend.close)  # workers that wait for this one learn of it
        if membership is None:
            forbid_restart(backend.workers)
        raise


def _part_of(config: Config, backend: Backend) -> str:
    """Return which part of the model this worker has, in words that follow an activity; empty if all."""
    if config.stages == 1 or backend.workers.size % config.stages:
        return ""
    return f", as {Layout.of(backend.workers, config.stages).describe()}"


def _watched(job: JobSpec, backend: Backend, watching: Watching) -> WorkerWatch:
    """Collective. Watch the workers of a job that is not elastic."""
    limits = WatchLimits(job.config.stall_timeout, silence_seconds(), is_debugging())
    with expect_answer(_FIRST_ANSWER_SECONDS, backend.workers.rank, backend.workers.host):
        watch, watching.note = watch_workers(
            backend.workers,
            limits,
            lambda event, stacks: end_at_once(event, stacks, watching.on_worker_lost),
        )
    watching.explain = watch.explain
    return watch


def check_may_be_elastic(membership: Membership | None) -> None:
    """Check that what needs a fixed number of workers was not started as an elastic job.

    Args:
        membership: this worker's part in an elastic job; None if what it does cannot be elastic.

    Raises:
        UsageError: If it was.
    """
    if membership is None and is_elastic():
        raise UsageError(
            "only training can be an elastic job; this needs a fixed number of workers",
            "Start it without --min-np, --max-np and --host-discovery-script.",
            everywhere=True,
        )


def check_alone(backend: Backend, command: str) -> None:
    """Check that this is the only worker. Local: no collective.

    Raises:
        UsageError: on every worker alike, if there are several.
    """
    if backend.workers.size > 1:
        raise UsageError(
            f"{command} is done by one worker; there are {backend.workers.size}",
            f"Start it without a launcher: python -m hvdtrain {command} ...",
            everywhere=True,
        )


def handshake(job: JobSpec, backend: Backend) -> list[str]:
    """Collective. Check that all workers answer, with the same config and versions; return their hosts."""
    workers = backend.workers
    with expect_answer(_FIRST_ANSWER_SECONDS, workers.rank, workers.host):
        hosts = workers.allgather_object(workers.host)
    assert_consistent(workers, common_values(job, backend))
    return hosts


def common_values(job: JobSpec, backend: Backend) -> dict[str, Any]:
    """Return what must be equal on all workers before they open their data."""
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"Python": python, "Horovod": job.build_identity, **versions_with(backend)}
    return {
        **job.config.model_dump(mode="json"),
        **{f"version of {name}": version for name, version in versions.items()},
    }
