"""One run: its state, its services, and the data that it reads."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.backends.base import Backend, probes, trained_parameters
from hvdtrain.backends.hooks import LoopHooks
from hvdtrain.backends.memory import MemoryPlan
from hvdtrain.backends.options import replica, replicas, speaks_for_replica
from hvdtrain.backends.step_metrics import NO_FLAGS, ControlFlags
from hvdtrain.checkpoints.digest import ArrayForm
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.checkpoints.saver import Saver
from hvdtrain.config import Config
from hvdtrain.data.bad_samples import BadSample
from hvdtrain.data.eval_sets import TRAINING_DATA, fetch_with_name, set_words, sets_of
from hvdtrain.data.feed import Feed, HostBatch, Order, Reader, Shard
from hvdtrain.data.fingerprint import Fingerprint
from hvdtrain.data.order import SequentialOrder, training_order
from hvdtrain.data.readers import Readers
from hvdtrain.data.stream import Stream
from hvdtrain.data.stream_feed import StreamFeed
from hvdtrain.data.stream_sharding import StreamPart
from hvdtrain.errors import PeerLostError
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.report import Report
from hvdtrain.run_state import STEPPED, RunState
from hvdtrain.storage.urls import is_url, join
from hvdtrain.training_plan import Progress, TrainingPlan, most_workers


@dataclass
class SkippedSamples:
    """Samples that could not be read and were skipped.

    Attributes:
        count: how many, on all workers.
        unreported: those of this worker that the others do not know of yet, in words.
        reported: those that the user was told of, in words; the same on every worker.
    """

    count: int = 0
    unreported: list[str] = field(default_factory=list)
    reported: set[str] = field(default_factory=set)


@dataclass
class Session:
    """One run: what the loop is given.

    The services ``report``, ``saver`` and ``readers`` are made when the run is entered and closed when
    it is left. The fields after them change while the run trains.

    Attributes:
        config: the resolved config.
        backend: the framework.
        train_data: the training data, a Dataset.
        eval_data: the evaluation data: a Dataset, EvalSets of them, or None.
        run_dir: the run directory.
        report: where the run shows and writes itself.
        saver: what writes checkpoints.
        hooks: the other parts of hvdtrain that take part in the loop.
        readers: the processes that read samples, if there are any.
        memory: what this worker takes of memory; None before it is known.
        heaviest: what the worker takes that takes most; None before it is known.
        fingerprints: those of the data, by the names that a checkpoint knows them by.
        forms: what stands for a batch in the digest of a checkpoint; empty if no digest is made.
        generation: the number of the world that this worker of an elastic job is in; 0 in other jobs.
        lost_lease: returns why this worker may no longer write files; empty while it may.
        state: what a checkpoint keeps of the run.
        skipped: samples that could not be read.
        speeds: samples/s of every logged window of training.
        stopped: whether training ended because a worker asked for it.
        stopped_early: why and where training ended because nothing got better; empty otherwise.
        is_started: whether this process's report was told that training starts.
        wanted: what any worker wants all of them to do, as far as metrics were read, and is not done yet.
        unsent: what this worker wants of the others and may not have told them, because a step failed.
        lost: the failure of a collective in a callback that this worker has put off, to finish what it did.
        keeps_history: whether the summary that training returns has the run's history.
        watched: those of ``on_step`` and ``on_window`` that callbacks of some worker have: they are called
            before the next step, which follows what they freeze and thaw.
        stoppers: the user's callbacks that say after an evaluation whether training ends; rank 0 asks them.
        settle: reads the metrics of steps that are done, without the other workers, and reports them.
    """

    config: Config
    backend: Backend
    train_data: Any
    eval_data: Any
    report: Report
    run_dir: Path
    saver: Saver = field(default_factory=Saver)
    hooks: LoopHooks = field(default_factory=LoopHooks)
    readers: Readers | None = None
    memory: MemoryPlan | None = None
    heaviest: MemoryPlan | None = None
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    forms: Mapping[str, ArrayForm] = field(default_factory=dict)
    generation: int = 0
    lost_lease: Callable[[], str] = lambda: ""
    state: RunState = field(default_factory=RunState)
    skipped: SkippedSamples = field(default_factory=SkippedSamples)
    speeds: list[float] = field(default_factory=list)
    stopped: bool = False
    stopped_early: str = ""
    is_started: bool = False
    wanted: ControlFlags = NO_FLAGS
    unsent: ControlFlags = NO_FLAGS
    lost: PeerLostError | None = None
    keeps_history: bool = False
    watched: frozenset[str] = frozenset()
    stoppers: Sequence[Any] = ()
    settle: Callable[[], None] = lambda: None

    @property
    def is_remote(self) -> bool:
        """Whether the run directory is at a URL, and ``run_dir`` its working copy."""
        return self.config.run_dir is not None and is_url(self.config.run_dir)

    def location_of(self, path: Path) -> str:
        """Return where a file of the run is, as users know it: the URL if the run directory is at one."""
        if not self.is_remote or not path.is_relative_to(self.run_dir):
            return str(path)
        return join(str(self.config.run_dir), *path.relative_to(self.run_dir).parts)

    @cached_property
    def data_size(self) -> int:
        """Samples in the training data, which are counted once: each step needs them."""
        return len(self.train_data)

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return self.state.progress.samples / self.data_size

    def plan(self) -> TrainingPlan:
        """Return what follows from the current number of workers."""
        workers = self.backend.workers
        return TrainingPlan.of(
            self.config,
            replicas(workers, self.config),
            self.data_size,
            self.state.progress,
            most=most_workers(workers),
            rescale=self.state.rescale,
            is_dealt=self.is_stream and self.train_data.is_dealt(workers.size),
        )

    def learning_rate(self, plan: TrainingPlan) -> float:
        """Return the learning rate of the next step."""
        plateau = self.state.plateau
        return plan.learning_rate_at(self.state.progress, 1.0 if plateau is None else plateau.fraction)

    @contextmanager
    def put_off_loss(self) -> Iterator[None]:
        """Return a context that puts off the failure of a callback's collective until ``raise_loss``.

        What must be done once, such as taking a window as logged, is then done whole.
        """
        try:
            yield
        except PeerLostError as error:
            self.lost = self.lost or error

    def raise_loss(self) -> None:
        """Raise what was put off.

        Raises:
            PeerLostError: If a collective of a callback failed.
        """
        if self.lost is not None:
            error, self.lost = self.lost, None
            raise error

    @contextmanager
    def pause_timer(self) -> Iterator[None]:
        """Return a context whose time, an evaluation's or a save's, does not count in the throughput.

        It does not count either in how long this worker is busy with its steps.
        """
        paused_seconds = time.perf_counter()
        yield
        self.state.window.started_seconds += time.perf_counter() - paused_seconds
        probes(self.backend).restart_clock()

    @property
    def is_stream(self) -> bool:
        """Whether the training data can only be read one sample after the other."""
        return isinstance(self.train_data, Stream)

    def advance(self, plan: TrainingPlan, learning_rate: float, taken: float) -> StepInfo:
        """Move progress by the step that was just launched; return what the host knows of it.

        Args:
            plan: how the run is done.
            learning_rate: that of the step.
            taken: samples of the step, which of a stream only the step itself tells.
        """
        before = self.state.progress
        after = before.samples + round(taken) if self.is_stream else plan.samples_after(before.samples)
        self.state.progress = Progress(before.step + 1, after)
        step = self.step_info(learning_rate, before.samples)
        self.state.last_step, self.state.stage = step, STEPPED
        return step

    def step_info(self, learning_rate: float, samples_before: int | None = None) -> StepInfo:
        """Return where training stands now.

        Args:
            learning_rate: that of the last step.
            samples_before: samples seen before the last step.
        """
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
        return self.state.to_manifest(
            self.config,
            data_size=self.data_size,
            workers=self.backend.workers.size,
            versions=versions_with(self.backend),
            seconds=self.report.seconds(),
            data=self.fingerprints,
            trained=trained_parameters(self.backend).trained_state(),
        )

    def train_feed(self, plan: TrainingPlan) -> Feed:
        """Return this worker's training batches from here to the end."""
        if self.is_stream:
            return StreamFeed(self._train_part(plan), self.backend.workers.allgather_object)
        return self._feed(self._train_reader(plan, self.state.progress))

    def train_batch(self, plan: TrainingPlan, at: Progress) -> HostBatch | None:
        """Read this worker's batch of the step that begins at a place; None if training ends there.

        Of a stream, it holds the first sample, wherever the step begins.
        """
        if self.is_stream:
            return None if at.samples >= plan.last_sample else _of_first_sample(self._train_part(plan))
        return _first(self._train_reader(plan, at))

    def eval_feed(self, plan: TrainingPlan, name: str = "") -> Feed:
        """Return this worker's shard of the evaluation data, or of one of their sets, once."""
        dataset = sets_of(self.eval_data)[name]
        if isinstance(dataset, Stream):
            part = StreamPart(dataset, plan.eval_batch, self.backend.workers.rank)
            return StreamFeed(part, self.backend.workers.allgather_object)
        return self._feed(self._eval_reader(plan, name), f" of the {set_words(name)}" if name else "")

    def eval_batch(self, plan: TrainingPlan, name: str = "") -> HostBatch | None:
        """Read this worker's first batch of the evaluation data, or of one of their sets."""
        dataset = sets_of(self.eval_data)[name]
        if isinstance(dataset, Stream):
            return _of_first_sample(StreamPart(dataset, plan.eval_batch, self.backend.workers.rank))
        return _first(self._eval_reader(plan, name))

    def _train_reader(self, plan: TrainingPlan, at: Progress) -> Reader:
        order = training_order(self.train_data, self.data_size, self.config.seed)
        shard = Shard(
            plan=plan.batch,
            rank=replica(self.backend.workers, self.config),
            first_step=at.step,
            first_sample=at.samples,
            last_sample=plan.last_sample,
            warmup_samples=plan.warmup_samples,
        )
        return self._reader(TRAINING_DATA, self.train_data, order, shard)

    def _train_part(self, plan: TrainingPlan) -> StreamPart:
        return StreamPart(
            self.train_data,
            plan.batch,
            self.backend.workers.rank,
            seed=self.config.seed,
            first_step=self.state.progress.step,
            first_sample=self.state.progress.samples,
            last_sample=plan.last_sample,
            last_step=plan.steps if plan.by_steps else None,
            in_warmup=lambda step, samples: plan.in_warmup(Progress(step, samples)),
        )

    def _eval_reader(self, plan: TrainingPlan, name: str) -> Reader:
        dataset = sets_of(self.eval_data)[name]
        shard = Shard(plan.eval_batch, replica(self.backend.workers, self.config), 0, 0, len(dataset))
        return self._reader(
            set_words(name), dataset, SequentialOrder(len(dataset)), shard, is_named=bool(name)
        )

    def _reader(self, words: str, dataset: Any, order: Order, shard: Shard, is_named: bool = False) -> Reader:
        readers = self.readers or Readers({words: dataset}, skip=self.config.on_bad_sample == "skip")
        fetch = readers.fetch_from(words)
        if is_named:
            fetch = fetch_with_name(fetch, words)
        return Reader(dataset, order, shard, fetch, replaces=words == TRAINING_DATA)

    def _feed(self, reader: Reader, of_set: str = "") -> Feed:
        def note(bad: BadSample) -> None:
            if speaks_for_replica(self.backend.workers, self.config):
                self.skipped.unreported.append(bad.describe(of_set))

        has_processes = self.readers is not None and self.readers.pids
        threads = self.config.read_workers if has_processes else self.config.read_threads
        return Feed(reader, threads, on_bad_sample=note)


def _of_first_sample(part: StreamPart) -> HostBatch:
    """Return a batch that has the first sample of a stream in every place."""
    _, real = part.plan.part(part.rank, part.plan.global_batch)
    items = [(0, part.stream.first())] * int(real.sum())
    return part.host_batch(0, 0, items, real, part.plan.global_batch)


def _first(reader: Reader) -> HostBatch | None:
    return reader[0][0] if len(reader) else None


def readers_for(config: Config, train_data: Any, eval_data: Any) -> Readers:
    """Start the processes that read this worker's samples, if the config asks for some.

    Args:
        config: the resolved config.
        train_data: the training data; None if none is read.
        eval_data: the evaluation data: a Dataset, EvalSets of them, or None.

    Raises:
        TaskError: If a data set cannot be serialized.
    """
    given = {set_words(name): dataset for name, dataset in sets_of(eval_data).items()}
    if train_data is not None:
        given[TRAINING_DATA] = train_data
    given = {words: dataset for words, dataset in given.items() if not isinstance(dataset, Stream)}
    return Readers(given, config.read_workers, skip=config.on_bad_sample == "skip")


def versions_with(backend: Backend) -> dict[str, str]:
    """Return the versions of hvdtrain and of what the backend computes with, by name."""
    return {"hvdtrain": hvdtrain.__version__, **backend.info.versions}
