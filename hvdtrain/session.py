"""One run: its state, its services, and the data that it reads."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.backends.base import Backend
from hvdtrain.backends.hooks import LoopHooks
from hvdtrain.backends.memory import MemoryPlan
from hvdtrain.backends.step_metrics import NO_FLAGS, ControlFlags
from hvdtrain.callbacks import with_nan
from hvdtrain.checkpoints.digest import ArrayForm
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.checkpoints.saver import Saver
from hvdtrain.config import Config
from hvdtrain.data.training_data import TrainingData
from hvdtrain.early_stopping import EarlyStoppingState, PlateauState
from hvdtrain.errors import PeerLostError
from hvdtrain.metrics import StepInfo, Window
from hvdtrain.reporting.jsonl import finite
from hvdtrain.reporting.report import Report
from hvdtrain.schedule import TrainingProgress
from hvdtrain.storage.files import run_folder
from hvdtrain.storage.urls import is_url, join
from hvdtrain.training_plan import Progress, TrainingPlan, most_workers
from hvdtrain.workers.wire_types import travels
from hvdtrain.workers.world import TrainingPosition


class StepEnd(IntEnum):
    """What of a step's end is done: the step alone; its evaluation, and what follows from that; its save."""

    STEPPED, JUDGED, SAVED = range(3)


@travels
@dataclass
class RunState:
    """Where a run stands, in addition to model and optimizer."""

    progress: Progress = field(default_factory=Progress)  # steps and samples done
    window: Window = field(default_factory=Window)  # the steps since the last logged line
    last_eval: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    last_eval_step: int | None = None  # when it was; None before the first
    seconds_before: float = 0.0  # time that was spent training before this process
    # how long there was no improvement; None if the run does not stop early
    early_stopping: EarlyStoppingState | None = None
    # what the learning rate was lowered to; None if its schedule is another than plateau
    plateau: PlateauState | None = None
    best_value: float | None = None  # value of the metric that keep_best names, of the best checkpoint so far
    tracking_id: str | None = None  # the run's name among trackers; None if no tracker has it
    changes: int = 0  # how often the workers of an elastic job changed while this job trained
    paused_seconds: float = 0.0  # the time without training that this took
    last_step: StepInfo | None = None  # the last step that this job did; None before it did one
    step_end: int = StepEnd.SAVED  # what of the end of that step is done, or was not due
    # whether callbacks were called to find whether training ends, and this worker does not have their answer,
    # as a peer was lost
    awaits_answer: bool = False
    save_is_due: bool = False  # whether the state must be saved before the next step
    saved_step: int | None = None  # when the state was last copied to be written

    @property
    def place(self) -> TrainingPosition:
        """Where training stands, as the driver of an elastic job compares it."""
        step = self.progress.step
        return TrainingPosition(step, self.step_end) if step else TrainingPosition()

    @property
    def is_unfinished(self) -> bool:
        """Whether something that is due after the last step is not done."""
        is_left = self.step_end < StepEnd.SAVED or self.save_is_due or self.awaits_answer
        return self.last_step is not None and is_left

    @classmethod
    def from_manifest(
        cls, manifest: Manifest | None, config: Config, best_value: float | None = None
    ) -> "RunState":
        """Return the state that a checkpoint kept, or that of a new run without one."""
        waiting, plateau = (None, None) if manifest is None else (manifest.waiting, manifest.plateau)
        state = cls(
            early_stopping=EarlyStoppingState.continued(config.early_stopping, waiting),
            plateau=PlateauState.continued(config.plateau_goal, plateau),
            best_value=best_value,
        )
        if manifest is not None:
            state.progress = Progress(manifest.step, manifest.samples)
            sums, weight, weights = manifest.window, manifest.window_weight, dict(manifest.window_weights)
            state.window = Window(with_nan(sums), weight, weight, weights=weights)
            state.window.bad_samples = manifest.window_bad_samples
            state.last_eval = with_nan(manifest.last_metrics)
            state.last_eval_step = manifest.step if manifest.metrics else None
            state.seconds_before, state.tracking_id = manifest.seconds, manifest.tracking_id
        return state


@dataclass
class Services:
    """What a run shows and writes itself with: made when the run is entered, closed when it is left."""

    report: Report  # where the run shows and writes itself
    run_dir: Path  # the run directory
    saver: Saver = field(default_factory=Saver)  # what writes checkpoints
    # the other parts of hvdtrain that take part in the loop
    hooks: LoopHooks = field(default_factory=LoopHooks)
    # what stands for a batch in the digest of a checkpoint; empty if no digest is made
    forms: Mapping[str, ArrayForm] = field(default_factory=dict)
    generation: int = 0  # the number of the world that this worker of an elastic job is in; 0 in other jobs
    # returns why this worker may no longer write files; empty while it may
    lost_lease: Callable[[], str] = lambda: ""
    has_started: bool = False  # whether the report knows that training has started
    speeds: list[float] = field(default_factory=list)  # samples/s of every logged window of training
    keeps_history: bool = False  # whether the summary that training returns has the run's history
    # those of ``on_step`` and ``on_window`` that callbacks of some worker have: they are called before the
    # next step, which follows what they freeze and thaw
    watched: frozenset[str] = frozenset()
    # the task's learning_rate_factor, checked; None if the task has none
    rate_factor: Callable[[TrainingProgress], float] | None = None
    # the user's callbacks that rank 0 calls after an evaluation to find whether training ends
    stoppers: Sequence[Any] = ()
    largest_memory: MemoryPlan | None = None  # what the worker takes that takes most; None before it is known


@dataclass
class Session:
    """One run: what the loop is given. ``state`` and the fields from ``memory`` on change while it trains."""

    config: Config  # the resolved config
    backend: Backend  # the framework
    data: TrainingData  # what the run reads
    services: Services  # what it shows and writes itself with
    state: RunState = field(default_factory=RunState)  # what a checkpoint keeps of the run
    memory: MemoryPlan | None = None  # what this worker takes of memory; None before it is known
    stopped: bool = False  # whether training ended because a worker requested it
    stopped_early: str = ""  # why and where training ended because nothing got better; empty otherwise
    # what any worker requests of all of them, as far as metrics were read, and is not done yet
    wanted: ControlFlags = NO_FLAGS
    # what this worker requests of the others and may not have reached them, as a step failed
    unsent: ControlFlags = NO_FLAGS
    # the failure of a collective in a callback, which is raised when the rest is done
    deferred_error: PeerLostError | None = None
    # reads and reports the metrics of steps that are done, without the other workers
    read_alone: Callable[[], None] = lambda: None

    @property
    def is_remote(self) -> bool:
        """Whether the run directory is at a URL, and ``run_dir`` its working copy."""
        return self.config.run_dir is not None and is_url(self.config.run_dir)

    def location_of(self, path: Path) -> str:
        """Return where a file of the run is, as users know it."""
        return location_of(self.config, path)

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return self.state.progress.samples / self.data.size

    def plan(self) -> TrainingPlan:
        """Return what follows from the current number of workers."""
        workers = self.backend.workers
        return TrainingPlan.of(
            self.config,
            self.data.place.replicas,
            self.data.size,
            self.state.progress,
            most=most_workers(workers),
            is_dealt=self.data.is_sharded,
            rate_factor=self.services.rate_factor,
        )

    def learning_rate(self, plan: TrainingPlan) -> float:
        """Return the learning rate of the next step."""
        plateau = self.state.plateau
        return plan.learning_rate_at(self.state.progress, 1.0 if plateau is None else plateau.fraction)

    @contextmanager
    def defer_peer_loss(self) -> Iterator[None]:
        """Return a context that defers the failure of a callback's collective until ``raise_deferred``."""
        # What must be done once, such as taking a window as logged, is then done whole.
        try:
            yield
        except PeerLostError as error:
            self.deferred_error = self.deferred_error or error

    def raise_deferred(self) -> None:
        """Raise what was deferred."""
        if self.deferred_error is not None:
            error, self.deferred_error = self.deferred_error, None
            raise error

    def settle(self) -> None:
        """Bring the run's numbers to where its state is, after a collective failed. Local: no collective."""
        # The metrics of a step that was done are read, added and reported; they were reduced in the step.
        self.read_alone()
        self.deferred_error = None

    def start_report(self, plan: TrainingPlan) -> None:
        """Report that training starts, once."""
        services, state = self.services, self.state
        if not services.has_started:
            services.report.on_start(plan.steps, state.progress.step, state.seconds_before)
            services.has_started = True

    @contextmanager
    def pause_timer(self) -> Iterator[None]:
        """Return a context whose time, an evaluation's or a save's, does not count in the throughput."""
        # It does not count either in how long this worker is busy with its steps.
        paused_seconds = time.perf_counter()
        yield
        self.state.window.started_seconds += time.perf_counter() - paused_seconds
        self.services.hooks.after_pause()

    def advance(self, plan: TrainingPlan, learning_rate: float, taken: float) -> StepInfo:
        """Move progress by the step that was just launched; return what the host knows of it."""
        before = self.state.progress
        after = self.data.position_after(plan, before.samples, taken)
        self.state.progress = Progress(before.step + 1, after)
        self.state.last_step = step = self.step_info(learning_rate, before.samples)
        self.state.step_end = StepEnd.STEPPED
        return step

    def step_info(self, learning_rate: float, samples_before: int | None = None) -> StepInfo:
        """Return where training stands now."""
        progress = self.state.progress
        return StepInfo(
            step=progress.step,
            samples_before=progress.samples if samples_before is None else samples_before,
            samples=progress.samples,
            epoch=self.epoch,
            workers=self.backend.workers.size,
            learning_rate=learning_rate,
            clock_seconds=time.perf_counter(),
        )

    def manifest(self) -> Manifest:
        """Return what a checkpoint that is made now keeps."""
        state, progress, window = self.state, self.state.progress, self.state.window
        evaluated_now = state.last_eval_step == progress.step
        return Manifest(
            step=progress.step,
            samples=progress.samples,
            data_size=self.data.size,
            seconds=self.services.report.seconds(),
            workers=self.backend.workers.size,
            config=self.config.model_dump(mode="json"),
            versions=versions_with(self.backend),
            metrics=finite(state.last_eval) if evaluated_now else {},
            last_metrics=finite(state.last_eval),
            window=finite(window.sums),
            window_weight=window.weight,
            window_weights=window.weights,
            window_bad_samples=window.bad_samples,
            waiting=state.early_stopping,
            plateau=state.plateau,
            tracking_id=state.tracking_id,
            data=dict(self.data.fingerprints),
            # what is trained, if that is not what the model was made with
            trained=self.backend.trained_state(),
        )


def location_of(config: Config, path: Path) -> str:
    """Return where a file of a run is, as users know it: the URL if the run directory is at one."""
    folder = run_folder(config.run_dir)
    if config.run_dir is None or not is_url(config.run_dir) or not path.is_relative_to(folder):
        return str(path)
    return join(config.run_dir, *path.relative_to(folder).parts)


def versions_with(backend: Backend) -> dict[str, str]:
    """Return the versions of hvdtrain and of what the backend computes with, by name."""
    return {"hvdtrain": hvdtrain.__version__, **backend.info.versions}
