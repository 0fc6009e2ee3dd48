"""Training in worlds: the workers of an elastic job may change, and training continues."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hvdtrain import errors
from hvdtrain.backends.step_metrics import NO_FLAGS
from hvdtrain.backends.workers import abort_collectives
from hvdtrain.callbacks import Summary
from hvdtrain.checkpoints.storage import newest_verified
from hvdtrain.config import Config
from hvdtrain.data.training_data import SkippedSamples
from hvdtrain.elastic.member.membership import Membership, connect
from hvdtrain.elastic.watch.liveness import Watching
from hvdtrain.host.launcher import is_elastic
from hvdtrain.jobs import outcome
from hvdtrain.jobs.elastic import world_state
from hvdtrain.jobs.entering import close_services, entered, open_services, seed_training
from hvdtrain.jobs.failures import Signals, end_of_job
from hvdtrain.jobs.opening.data_identity import agree_on_data, compare_with_job
from hvdtrain.jobs.opening.setup import TrainingRun, model_values
from hvdtrain.jobs.opening.start import common_values
from hvdtrain.jobs.plan_text import show_plan
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.loop import run as run_loop
from hvdtrain.loop import save_and_stop
from hvdtrain.reporting.report import report_of_others
from hvdtrain.session import RunState, Session
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
            world_state.warm_up(session)
        worlds = _Worlds(run, session, membership, signals, found.notes)
        watching.on_worker_lost = partial(outcome.write_summary_on_loss, session)
        with signals.defer_to_step_boundary():
            try:
                return worlds.train()
            finally:
                close_services(session)


class _Worlds:
    """The training of one worker through the worlds of its job."""

    def __init__(
        self,
        run: TrainingRun,
        session: Session,
        membership: Membership,
        signals: Signals,
        notes: Sequence[str],
    ) -> None:
        self._run, self._session, self._membership = run, session, membership
        self._signals, self._notes = signals, notes
        common = common_values(run.job, run.backend)
        self._values = {**common, **run.task_data.common_values, **model_values(run.model)}
        run.lock.job = membership.job
        session.services.lost_lease = lambda: membership.lost_lease
        # whether this worker's state is that of a step, and whether it is as the model was built
        self._is_whole, self._is_as_built = False, True
        self._has_begun = False  # whether this worker knows the run directory and has its report
        self._world: World | None = None
        self._paused_since: float | None = None  # by time.perf_counter
        self._entered_at_step, self._has_entered = 0, False
        self._summary: Summary | None = None  # of training that is over

    def train(self) -> Summary:
        """Train in one world after another; return the summary of training that is complete."""
        session, membership = self._session, self._membership

        def report(status: str, problem: str | None, error: BaseException) -> None:
            if isinstance(error, errors.Stopped | errors.Removed) or membership.lost_lease:
                return  # it is reported already, or this worker may not write
            with outcome.errors_noted(session.services.report):
                session.services.saver.finish(outcome.LAST_SAVE_SECONDS)  # the summary names it
            session.services.report.on_end(outcome.summarise(session, status, problem))

        with outcome.early_end_reported(session, membership.explain, report, membership.failed):
            while (summary := self._trained_in_next_world()) is None:
                pass
            return summary

    def _trained_in_next_world(self) -> Summary | None:
        """Return the summary of training that is complete; None if another world follows."""
        session, membership = self._session, self._membership
        try:
            world = self._next_world()
            self._enter(world)
            summary = self._train_in(world)
            membership.done(errors.EXIT_DONE)
            return summary
        except errors.JobEnded as ended:
            if ended.exit_code != errors.EXIT_DONE or self._summary is None:
                raise
            membership.done(errors.EXIT_DONE)
            newest = newest_verified(session.services.run_dir / CHECKPOINTS)  # which rank 0 wrote
            summary = replace(self._summary, checkpoint=None if newest is None else str(newest))
            return outcome.with_own_history(session, summary)
        except errors.Stopped:
            membership.done(errors.EXIT_STOPPED)
            raise
        except errors.WorldChanged:
            self._pause()
            session.backend.workers.leave(broken=False)
        except errors.PeerLostError:
            self._pause()
            ACTIVITY.enter("leaving a world that lost a worker")
            try:
                session.settle()
            except errors.PeerLostError:
                self._is_whole = False
            session.backend.workers.leave(broken=True)
        return None

    def _pause(self) -> None:
        """Note since when there is no training: since the last step that this worker did, if it did one."""
        if self._paused_since is None:
            state = self._session.state
            last = state.last_step if state.progress.step > self._entered_at_step else None
            self._paused_since = time.perf_counter() if last is None else last.clock_seconds

    def _next_world(self) -> World:
        """Return the next world; whoever was rank 0 and will not be has let the run directory go."""
        membership, before = self._membership, self._world
        place = self._session.state.place
        try:
            world = membership.next_world(place, valid=self._is_whole, values=self._values)
        except errors.Removed:
            if before is not None:
                world_state.hand_over_run(self._run, self._session, before)
            membership.left()
            raise
        if before is not None and world.rank:
            world_state.hand_over_run(self._run, self._session, world)
        self._world = world
        return world

    def _enter(self, world: World) -> None:
        """Collective. Connect the workers of a world, and bring all of them to the state of its rank 0."""
        session, membership = self._session, self._membership
        self._run.lock.generation = session.services.generation = world.generation
        ACTIVITY.enter("connecting the workers", is_long=True)
        try:
            session.backend.workers.restart(world)
        except errors.PeerLostError as error:
            membership.form_failed(error.problem)
            raise
        session.backend.enter_world()
        membership.formed()
        if world.source == "root":
            self._sync(world)
        else:
            self._start(world)
        seed_training(self._run, session.state.progress.step)
        membership.synced(session.state.place, str(session.services.run_dir))
        if world.change is not None:
            paused = world.change.since_seconds
            if self._has_entered and self._paused_since is not None:  # the driver may count from further back
                paused = time.perf_counter() - self._paused_since
            world_state.report_change(session, world, paused)
        session.services.report.on_workers_changed(world.rank, world.size)
        self._paused_since, self._entered_at_step, self._has_entered = None, session.state.progress.step, True

    def _train_in(self, world: World) -> Summary:
        """Collective. Train in a world to the end of training; return the summary, which all of them have."""
        session, workers = self._session, self._session.backend.workers
        self._is_as_built, why = False, None
        if world.purpose == "train":
            run_loop(session, outcome.polling(session, self._signals))
        else:
            save_and_stop(session)
            why = world.why or "the job has too few workers"
        with waiting_for_rank_zero(workers, "writing the last checkpoint"):
            session.services.saver.finish()
        status, problem = outcome.status_of(session, self._signals, why if session.stopped else None)
        with waiting_for_rank_zero(workers, "reading the last checkpoint"):
            self._summary = summary = outcome.summarise(session, status, problem, verified=True)
            session.services.report.on_end(summary)
        return outcome.end_together(session, summary)

    def _sync(self, world: World) -> None:
        """Collective. Give rank 0's state to all workers that do not have it."""
        session, workers = self._session, self._session.backend.workers
        is_root = workers.rank == 0
        has_it = self._is_whole and session.state.place == world.root
        all_have_it = all(workers.allgather_object(has_it))
        notes: Sequence[str] = ()
        with waiting_for_rank_zero(workers, "taking over the run directory"):
            if is_root:
                notes = world_state.take_over_run(self._run, session, world)
        common = workers.broadcast_object(world_state.where_it_stands(session) if is_root else None)
        if not is_root and not self._has_begun:
            compare_with_job(self._run.task_data.identity, common["data"])
        if not all_have_it:
            self._is_whole = has_it  # until here it had a state of its own
            self._is_as_built = False
            session.backend.broadcast_state(0)
        if not is_root:
            if not self._has_begun:  # a worker that joins makes its report
                context = self._run.context(common["run_dir"])
                session.services.report = report_of_others(context, self._run.callbacks)
                session.services.report.set_clock(common["seconds"])
                self._has_begun = True
            world_state.stand_there(session, common)
        self._is_whole = True
        for note in notes:
            session.services.report.note(note)

    def _start(self, world: World) -> None:
        """Collective. Begin training, or continue from a checkpoint: no worker has a state that is whole."""
        session = self._session
        self._is_whole = False
        self._run.lock.release()  # of a directory that was made in a world that was lost at once
        agree_on_data(session.backend.workers, self._run.task_data.identity)
        known = session.services.run_dir if self._has_begun else None
        if self._has_begun:
            world_state.hand_over_run(self._run, session, world)
        run, point = world_state.start_of(self._run, world, known, self._is_as_built)
        self._is_as_built = point.manifest is None
        before = max(
            session.backend.workers.allgather_object((session.state.changes, session.state.paused_seconds))
        )
        session.state = RunState.from_manifest(point.manifest, run.config, point.best_value(run.config))
        session.state.changes, session.state.paused_seconds = before
        session.data.skipped = SkippedSamples()
        session.services.speeds, session.services.has_started = [], False
        session.wanted = session.unsent = NO_FLAGS
        session.stopped_early = ""
        open_services(run, session, point)
        self._has_begun = self._is_whole = True
        show_plan(run, session, point, self._notes)
