"""Training in worlds: the workers of an elastic job may change, and training continues."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hvdtrain.backends.workers import abort_collectives
from hvdtrain.callbacks import Summary
from hvdtrain.checkpoints.verification import newest_verified
from hvdtrain.config import Config
from hvdtrain.elastic.member.membership import Membership, connect
from hvdtrain.elastic.watch.liveness import Watching
from hvdtrain.errors import (
    EXIT_DONE,
    EXIT_STOPPED,
    JobEnded,
    PeerLostError,
    Removed,
    Stopped,
    WorldChanged,
)
from hvdtrain.host.launcher import is_elastic
from hvdtrain.jobs.elastic.world_state import (
    WorldState,
    hand_over_run,
    report_change,
    values_to_compare,
    warm_up,
)
from hvdtrain.jobs.entering import close_services, entered, seed_training
from hvdtrain.jobs.failures import Signals, end_of_job
from hvdtrain.jobs.opening.setup import TrainingRun
from hvdtrain.jobs.outcome import (
    LAST_SAVE_SECONDS,
    Ending,
    early_end_reported,
    end_together,
    errors_noted,
    polling,
    status_of,
    summarise,
    with_own_history,
    write_summary_on_loss,
)
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.loop import run as run_loop
from hvdtrain.loop import save_and_stop
from hvdtrain.session import Session
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import waiting_for_rank_zero
from hvdtrain.workers.world import World


def join_elastic_job(config: Config, signals: Signals, watching: Watching) -> Membership | None:
    """Join the elastic job that started this process; return None if the job is not elastic."""
    if not is_elastic():
        return None
    client = connect(os.environ, stall_timeout=config.stall_timeout, abort=abort_collectives)
    client.on_end(lambda error: end_of_job(error, None if client.lost_lease else watching.on_worker_lost))
    signals.membership = client
    return client


def train_in_worlds(
    run: TrainingRun, membership: Membership, signals: Signals, watching: Watching
) -> Summary:
    """Train as a worker of an elastic job, which is alone until the driver names the first world."""
    seed_training(run, 0)
    with entered(run, ResumePoint()) as (session, found):
        if membership.is_joining:
            warm_up(session)
        worlds = Worlds(run, session, membership, signals, found.notes)
        watching.on_worker_lost = partial(write_summary_on_loss, session)
        with signals.defer_to_step_boundary():
            try:
                return worlds.train()
            finally:
                close_services(session)


class Worlds:
    """The training of one worker through the worlds of its job."""

    def __init__(
        self,
        run: TrainingRun,
        session: Session,
        membership: Membership,
        signals: Signals,
        found: Sequence[str] = (),
    ) -> None:
        self._run, self._session, self._membership = run, session, membership
        self._signals = signals
        self._values = values_to_compare(run)
        run.lock.job = membership.job
        session.services.lost_lease = lambda: membership.lost_lease
        self._state = WorldState(run, session, found)
        self._world: World | None = None
        self._paused_since: float | None = None  # by time.perf_counter
        self._entered_at_step, self._has_entered = 0, False
        self._summary: Summary | None = None  # of training that is over

    def train(self) -> Summary:
        """Train in one world after another; return the summary of training that is complete."""
        with early_end_reported(
            self._session, self._membership.explain, self._report_early_end, self._membership.failed
        ):
            return self._train_in_worlds()

    def _report_early_end(self, ending: Ending) -> None:
        session = self._session
        if isinstance(ending.error, Stopped | Removed) or self._membership.lost_lease:
            return  # it is reported already, or this worker may not write
        with errors_noted(session.services.report):
            session.services.saver.finish(LAST_SAVE_SECONDS)  # the summary then names what is being written
        session.services.report.on_end(summarise(session, ending.status, ending.problem))

    def _train_in_worlds(self) -> Summary:
        workers = self._session.backend.workers
        while True:
            try:
                world = self._next_world()
                self._enter(world)
                summary = self._train_in(world)
                self._membership.done(EXIT_DONE)
                return summary
            except JobEnded as ended:
                if ended.exit_code != EXIT_DONE or self._summary is None:
                    raise
                self._membership.done(EXIT_DONE)
                newest = newest_verified(self._session.services.run_dir / CHECKPOINTS)  # which rank 0 wrote
                summary = replace(self._summary, checkpoint=None if newest is None else str(newest))
                return with_own_history(self._session, summary)
            except Stopped:
                self._membership.done(EXIT_STOPPED)
                raise
            except WorldChanged:
                self._pause()
                workers.leave(broken=False)
            except PeerLostError:
                self._pause()
                self._settle()
                workers.leave(broken=True)

    def _pause(self) -> None:
        """Note since when there is no training: since the last step that this worker did, if it did one."""
        if self._paused_since is None:
            state = self._session.state
            last = state.last_step if state.progress.step > self._entered_at_step else None
            self._paused_since = time.perf_counter() if last is None else last.clock_seconds

    def _settle(self) -> None:
        """Bring the numbers to where the state is, without the others. Local: no collective."""
        ACTIVITY.enter("leaving a world that lost a worker")
        try:
            self._session.settle()
        except PeerLostError:
            self._state.is_whole = False

    def _next_world(self) -> World:
        """Return the next world; whoever was rank 0 and will not be has let the run directory go."""
        membership, before = self._membership, self._world
        place = self._session.state.place
        try:
            world = membership.next_world(place, valid=self._state.is_whole, values=self._values)
        except Removed:
            if before is not None:
                hand_over_run(self._run, self._session, before)
            membership.left()
            raise
        if before is not None and world.rank:
            hand_over_run(self._run, self._session, world)
        self._world = world
        return world

    def _enter(self, world: World) -> None:
        """Collective. Connect the workers of a world, and bring all of them to the state of its rank 0."""
        session, membership = self._session, self._membership
        self._run.lock.generation = session.services.generation = world.generation
        ACTIVITY.enter("connecting the workers", is_long=True)
        try:
            session.backend.workers.restart(world)
        except PeerLostError as error:
            membership.form_failed(error.problem)
            raise
        session.backend.enter_world()
        membership.formed()
        if world.source == "root":
            self._state.sync(world)
        else:
            self._state.start(world)
        seed_training(self._run, session.state.progress.step)
        membership.synced(session.state.place, str(session.services.run_dir))
        if world.change is not None:
            paused = world.change.since_seconds
            if self._has_entered and self._paused_since is not None:  # the driver may count from further back
                paused = time.perf_counter() - self._paused_since
            report_change(session, world, paused)
        session.services.report.on_workers_changed(world.rank, world.size)
        self._paused_since, self._entered_at_step, self._has_entered = None, session.state.progress.step, True

    def _train_in(self, world: World) -> Summary:
        """Collective. Train in a world to the end of training; return the summary, which all of them have."""
        session, workers = self._session, self._session.backend.workers
        self._state.is_as_built, why = False, None
        if world.purpose == "train":
            run_loop(session, polling(session, self._signals))
        else:
            save_and_stop(session)
            why = world.why or "the job has too few workers"
        with waiting_for_rank_zero(workers, "writing the last checkpoint"):
            session.services.saver.finish()
        status, problem = status_of(session, self._signals, why if session.stopped else None)
        with waiting_for_rank_zero(workers, "reading the last checkpoint"):
            self._summary = summary = summarise(session, status, problem, verified=True)
            session.services.report.on_end(summary)
        return end_together(session, summary)
