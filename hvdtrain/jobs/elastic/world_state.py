"""How all workers of a world of an elastic job come to one state."""

from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.backends.step_signals import NO_FLAGS
from hvdtrain.checkpoints.storage import step_of
from hvdtrain.errors import EnvironmentFault
from hvdtrain.jobs.common_state import Common
from hvdtrain.jobs.elastic.take_over import RunServices, hand_over_run, take_over_run
from hvdtrain.jobs.elastic_start import report_of_others, start_of
from hvdtrain.jobs.opening.data_identity import agree_on_data, compare_with_job
from hvdtrain.jobs.training_run import TrainingRun, open_services, plan_and_notes
from hvdtrain.jobs.world_change import follow_workers
from hvdtrain.run_state import RunState
from hvdtrain.session import Session, SkippedSamples
from hvdtrain.workers.agreement import waiting_for_rank_zero
from hvdtrain.workers.world import World


class WorldState:
    """The state of one worker, and how it gets that of a world.

    Args:
        run: the training.
        session: the run.
        services: what the worker needs to become rank 0.
        found: the notes of the dry run.

    Attributes:
        is_whole: whether model, optimizer and run are of one place, so that others may take them.
        is_as_built: whether model and optimizer are as they were built, but for the initial weights.
    """

    def __init__(
        self, run: TrainingRun, session: Session, services: RunServices, found: Sequence[str]
    ) -> None:
        self.is_whole, self.is_as_built = False, True
        self._run, self._session, self._services, self._found = run, session, services, found
        self._has_begun = False  # whether this worker knows the run directory and has its report

    def sync(self, world: World) -> None:
        """Collective. Give rank 0's state to all workers that do not have it.

        Raises:
            EnvironmentFault: If this worker trains on other data, or cannot take over the run directory.
            PeerLostError: If another worker went away.
        """
        session, workers = self._session, self._session.backend.workers
        is_root = workers.rank == 0
        has_it = self.is_whole and session.state.place == world.root
        all_have_it = all(workers.allgather_object(has_it))
        notes: Sequence[str] = ()
        with waiting_for_rank_zero(workers, "taking over the run directory"):
            if is_root:
                notes = self._take_over(world)
        common = workers.broadcast_object(Common.of(session) if is_root else None)
        if not is_root and not self._has_begun:
            compare_with_job(self._run.task_data.identity, common.data)
        if not all_have_it:
            self.is_whole = has_it  # until here it had a state of its own
            self.is_as_built = False
            session.backend.broadcast_state(0)
        if not is_root:
            self._take(common)
        follow_workers(session)
        self.is_whole = True
        for note in notes:
            session.report.note(note)

    def start(self, world: World) -> None:
        """Collective. Begin training, or go on from a checkpoint: no worker has a state that is whole.

        Raises:
            HvdtrainError: as other jobs raise it when they start.
            EnvironmentFault: If training begins anew and this worker has trained.
        """
        session = self._session
        self.is_whole = False
        self._run.lock.release()  # of a directory that was made in a world that was lost at once
        agree_on_data(session.backend.workers, self._run.task_data.identity)
        known = session.run_dir if self._has_begun else None
        if self._has_begun:
            hand_over_run(session, world, self._services)
        run, point = start_of(self._run, world, known, self._check_as_built)
        self.is_as_built = point.manifest is None
        before = max(
            session.backend.workers.allgather_object((session.state.changes, session.state.paused_seconds))
        )
        session.state = RunState.from_manifest(point.manifest, run.config, point.best_value(run.config))
        session.state.changes, session.state.paused_seconds = before
        session.skipped, session.speeds, session.is_started = SkippedSamples(), [], False
        session.wanted = session.unsent = NO_FLAGS
        session.stopped_early = ""
        follow_workers(session)
        open_services(run, session, point, self._services.lost_lease)
        self._has_begun = self.is_whole = True
        describe, notes = plan_and_notes(run, session, point, self._found)
        session.report.say(describe())
        for note in notes:
            session.report.note(note)

    def _check_as_built(self) -> None:
        if not self.is_as_built:
            raise EnvironmentFault(
                "training starts anew, and model and optimizer of this worker are of an earlier start",
                "The driver of the job starts another worker in its place.",
            )

    def _take_over(self, world: World) -> Sequence[str]:
        """Become the worker that writes the run directory, unless it is that already. Local."""
        session, before = self._session, self._session.report
        notes = take_over_run(session, world, self._services)
        if session.report is not before:
            session.is_started = True  # the new report goes on from the one before
            written, saved = session.saver.newest, session.state.saved_step
            if saved is not None and (written is None or step_of(written) < saved):
                session.state.save_is_due = True  # it was lost with the rank 0 that wrote it
        return notes

    def _take(self, common: Common) -> None:
        """Take what rank 0 has in common with all; a worker that joins makes its report. Local."""
        session = self._session
        if not self._has_begun:
            context = replace(self._run.context(), run_dir=common.run_dir)
            session.report = report_of_others(context, self._run.callbacks)
            session.report.set_clock(common.seconds)
            self._has_begun = True
        common.give_to(session)
