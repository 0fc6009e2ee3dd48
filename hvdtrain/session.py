"""Everything that one run holds, and what follows from the number of workers."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.backends.base import Backend
from hvdtrain.config import Config
from hvdtrain.data.feed import Feed, Order, Reader, Share
from hvdtrain.data.order import BatchPlan, SequentialOrder, ShuffledOrder
from hvdtrain.data.readers import Readers
from hvdtrain.data.trace import IndexTrace
from hvdtrain.errors import ConfigError
from hvdtrain.logs import finite
from hvdtrain.metrics import StepMark, Window
from hvdtrain.patience import Waiting
from hvdtrain.record import Record
from hvdtrain.report import Report
from hvdtrain.saving import NoSaver, Saver
from hvdtrain.schedule import LearningRate, scaling_factor

# what messages call the two data sets, and reader processes know them by
TRAINING_DATA, EVALUATION_DATA = "training data", "evaluation data"


@dataclass(frozen=True)
class Progress:
    """Where training stands.

    Attributes:
        step: steps done.
        samples: samples seen: the position in the endless stream of training data.
    """

    step: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Layout:
    """What follows from the config, the number of workers and the size of the data.

    Attributes:
        batch: how a global batch of training is dealt.
        eval_batch: likewise for evaluation.
        base_batch: samples that the learning rate is quoted for.
        learning_rate: the learning rate as a function of progress.
        last_sample: position in the stream where training ends.
        steps: number of steps of the whole training.
    """

    batch: BatchPlan
    eval_batch: BatchPlan
    base_batch: int
    learning_rate: LearningRate
    last_sample: int
    steps: int

    @classmethod
    def of(cls, config: Config, workers: int, data_size: int, progress: Progress = Progress()) -> "Layout":
        """Work it out.

        Args:
            config: the resolved config.
            workers: number of workers.
            data_size: samples in the training data.
            progress: where training stands, perhaps after steps of another size.

        Raises:
            ConfigError: where the global batch has fewer samples than slots.
        """
        slots = workers * config.accumulate
        global_batch = config.global_batch_size or config.batch_size * slots
        if global_batch < slots:
            raise ConfigError(
                f"global_batch_size {global_batch} is smaller than workers x accumulate = "
                f"{workers} x {config.accumulate}; each worker needs a sample for each micro-batch",
                f"Use a global batch of at least {slots}, or fewer workers.",
                everywhere=True,
            )
        base_batch = config.base_batch_size or (
            global_batch if config.global_batch_size else config.batch_size * config.accumulate
        )
        if config.steps is not None:
            last_sample = progress.samples + max(0, config.steps - progress.step) * global_batch
        else:
            last_sample = max(1, round((config.epochs or 0) * data_size))
        batch = BatchPlan(global_batch, workers, config.accumulate)
        local_eval_batch = config.eval_batch_size or batch.micro_batch
        return cls(
            batch=batch,
            eval_batch=BatchPlan(local_eval_batch * workers, workers),
            base_batch=base_batch,
            learning_rate=LearningRate(
                peak=config.learning_rate * scaling_factor(config.lr_scaling, global_batch, base_batch),
                schedule=config.lr_schedule,
                total_epochs=last_sample / data_size,
                warmup_epochs=config.warmup_epochs,
                final_fraction=config.lr_final_fraction,
                step_epochs=config.lr_step_epochs,
                step_factor=config.lr_step_factor,
                cycle_epochs=config.lr_cycle_epochs,
            ),
            last_sample=last_sample,
            steps=progress.step + max(0, -(-(last_sample - progress.samples) // global_batch)),
        )

    def samples_after(self, samples: int) -> int:
        """Give the position in the stream after the step that starts at ``samples``."""
        return min(samples + self.batch.global_batch, self.last_sample)


@dataclass
class Session:
    """One run: what the loop is given.

    Attributes:
        config: the resolved config.
        backend: the framework.
        train_data: the training data, a Dataset.
        eval_data: the evaluation data, or None.
        report: where the run shows and writes itself.
        run_dir: the run directory.
        saver: what writes checkpoints.
        progress: where training stands.
        window: the steps since the last logged line.
        learning_rate: that of the last step.
        last_eval: metrics of the last evaluation.
        last_eval_step: when it was; None before the first.
        seconds_before: time that was spent training before this process.
        best_value: value of the metric that keep_best names, of the best checkpoint so far.
        speeds: samples/s of every logged window of training.
        stopped: whether training ended early because a worker asked for it.
        waiting: how long early stopping has waited; None where the run does not stop early.
        stopped_early: why and where training ended early because nothing got better; empty otherwise.
        readers: the processes that read samples, if there are any.
        bad_samples: how often a sample could not be read and was skipped, on all workers.
        untold: what this worker could not read and has not told yet, in words.
        told: the bad samples that the user was told of, in words; the same on every worker.
    """

    config: Config
    backend: Backend
    train_data: Any
    eval_data: Any
    report: Report
    run_dir: Path
    saver: Saver = field(default_factory=NoSaver)
    progress: Progress = field(default_factory=Progress)
    window: Window = field(default_factory=Window)
    learning_rate: float = 0.0
    last_eval: dict[str, float] = field(default_factory=dict)
    last_eval_step: int | None = None
    seconds_before: float = 0.0
    best_value: float | None = None
    speeds: list[float] = field(default_factory=list)
    stopped: bool = False
    waiting: Waiting | None = None
    stopped_early: str = ""
    readers: Readers | None = None
    bad_samples: int = 0
    untold: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)

    @property
    def data_size(self) -> int:
        """Samples in the training data."""
        return len(self.train_data)

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return self.progress.samples / self.data_size

    def mark(self, samples_before: int | None = None) -> StepMark:
        """Say where training stands now.

        Args:
            samples_before: samples seen before the last step.
        """
        samples = self.progress.samples
        return StepMark(
            step=self.progress.step,
            samples_before=samples if samples_before is None else samples_before,
            samples=samples,
            epoch=self.epoch,
            workers=self.backend.workers.size,
            learning_rate=self.learning_rate,
            clock_seconds=time.perf_counter(),
        )

    def layout(self) -> Layout:
        """Give what follows from the current number of workers."""
        return Layout.of(self.config, self.backend.workers.size, self.data_size, self.progress)

    def record(self) -> Record:
        """Say what a checkpoint that is made now should know."""
        evaluated_now = self.last_eval_step == self.progress.step
        return Record(
            step=self.progress.step,
            samples=self.progress.samples,
            data_size=self.data_size,
            seconds=self.report.seconds(),
            workers=self.backend.workers.size,
            config=self.config.model_dump(mode="json"),
            versions=versions_with(self.backend),
            metrics=finite(self.last_eval) if evaluated_now else {},
            last_metrics=finite(self.last_eval),
            window=finite(self.window.sums),
            window_weight=self.window.weight,
            waiting=self.waiting,
        )

    def train_feed(self, layout: Layout) -> Feed:
        """Read this worker's training batches from here to the end."""
        order = ShuffledOrder(self.data_size, self.config.seed)
        share = Share(
            plan=layout.batch,
            rank=self.backend.workers.rank,
            first_step=self.progress.step,
            first_sample=self.progress.samples,
            last_sample=layout.last_sample,
        )
        return self._feed(TRAINING_DATA, self.train_data, order, share)

    def eval_feed(self, layout: Layout) -> Feed:
        """Read this worker's share of the evaluation data, once."""
        size = len(self.eval_data)
        share = Share(layout.eval_batch, self.backend.workers.rank, 0, 0, size)
        return self._feed(EVALUATION_DATA, self.eval_data, SequentialOrder(size), share)

    def _feed(self, name: str, dataset: Any, order: Order, share: Share) -> Feed:
        config = self.config
        readers = self.readers or Readers({name: dataset}, skip=config.on_bad_sample == "skip")
        reader = Reader(dataset, order, share, readers.fetch_from(name), replaces=name == TRAINING_DATA)
        threads = config.read_workers if readers.pids else config.read_threads
        return Feed(reader, threads, tell=lambda bad: self.untold.append(bad.in_words()))

    def index_trace(self) -> IndexTrace:
        """Make the trace of indices that the config asks for."""
        if not self.config.trace_indices:
            return IndexTrace(None)
        path = self.run_dir / "indices" / f"rank-{self.backend.workers.rank:04d}.jsonl"
        return IndexTrace(path, self.progress.step)


def readers_for(config: Config, train_data: Any, eval_data: Any) -> Readers:
    """Start the processes that read this worker's samples, if the config asks for some.

    Args:
        config: the resolved config.
        train_data: the training data; None where none is read.
        eval_data: the evaluation data, or None.

    Raises:
        TaskError: where a data set cannot be handed to another process.
    """
    datasets = {TRAINING_DATA: train_data, EVALUATION_DATA: eval_data}
    given = {name: dataset for name, dataset in datasets.items() if dataset is not None}
    return Readers(given, config.read_workers, skip=config.on_bad_sample == "skip")


def versions_with(backend: Backend) -> dict[str, str]:
    """Give the versions of hvdtrain and of what the backend computes with, by name."""
    return {"hvdtrain": hvdtrain.__version__, **backend.versions()}
