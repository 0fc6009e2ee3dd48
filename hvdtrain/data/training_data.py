"""The data of a run behind one interface: data sets, whose samples have numbers, and streams."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hvdtrain.config import Config
from hvdtrain.data.eval_sets import TRAINING_DATA, by_words, fetch_with_name, set_words, sets_of
from hvdtrain.data.feed import Feed, HostBatch, Reader, Shard, read_ahead
from hvdtrain.data.fingerprint import Fingerprint
from hvdtrain.data.order import ShuffledOrder, ordering_of
from hvdtrain.data.readers import BadSample, Fetch, Readers
from hvdtrain.data.stream import Stream
from hvdtrain.data.stream_feed import StreamPart, feed_of
from hvdtrain.workers.agreement import WorkerPlace, Workers


@dataclass
class SkippedSamples:
    """Samples that could not be read and were skipped."""

    count: int = 0  # how many, on all workers
    # descriptions of those of this worker that the others do not know of yet
    unreported: list[str] = field(default_factory=list)
    # descriptions of those that were reported; the same on every worker
    reported: set[str] = field(default_factory=set)


@dataclass
class TrainingData:
    """What a run reads. Which kind of data it is, only this class knows."""

    config: Config  # the resolved config
    workers: Workers  # the job's workers
    training: Any  # the training data: a Dataset or a Stream
    evaluation: Any = None  # the evaluation data: a Dataset, a Stream, EvalSets of them, or None
    readers: Readers | None = None  # the processes that read samples, if there are any
    # those of the data, by the names that a checkpoint knows them by
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    skipped: SkippedSamples = field(default_factory=SkippedSamples)  # samples that could not be read

    @cached_property
    def place(self) -> WorkerPlace:
        """The place of this worker in the job."""
        return WorkerPlace(self.workers, self.config.stages)

    @cached_property
    def size(self) -> int:
        """Samples in the training data, which are counted once: each step needs them."""
        return len(self.training)

    @property
    def is_stream(self) -> bool:
        """Whether the training data can only be read one sample after the other."""
        return isinstance(self.training, Stream)

    @property
    def is_sharded(self) -> bool:
        """Whether each worker reads shards of its own, so that steps may have few samples."""
        return self.is_stream and bool(self.training.is_dealt(self.workers.size))

    def position_after(self, plan: Any, samples: int, taken: float) -> int:
        """Return the samples that were seen after a step."""
        return samples + round(taken) if self.is_stream else plan.samples_after(samples)

    def train_feed(self, plan: Any, at: Any) -> Feed:
        """Return this worker's training batches from a place to the end."""
        return self._feed(self._train_source(plan, at))

    def train_batch(self, plan: Any, at: Any) -> HostBatch | None:
        """Read this worker's batch of the step that begins at a place; of a stream, of its first sample."""
        return _first(self._train_source(plan, at))

    def batch_again(self, plan: Any, at: Any) -> HostBatch | None:
        """Read the batch of a step that is done again; None of a stream, which is read once."""
        return None if self.is_stream else self.train_batch(plan, at)

    def eval_feed(self, plan: Any, name: str = "") -> Feed:
        """Return this worker's shard of the evaluation data, or of one of their sets, once."""
        return self._feed(self._eval_source(plan, name), f" of the {set_words(name)}" if name else "")

    def eval_batch(self, plan: Any, name: str = "") -> HostBatch | None:
        """Read this worker's first batch of the evaluation data, or of one of their sets."""
        return _first(self._eval_source(plan, name))

    def skipped_in(self, feed: Feed, step: int | None = None) -> tuple[int, float]:
        """Return the samples that this worker skipped since the last call, and the seconds it waited."""
        skipped, waited_seconds = feed.take_notes(step)
        # workers of one replica read the same samples: the one of the first stage counts them
        return (skipped if self.place.is_first_stage else 0), waited_seconds

    def _train_source(self, plan: Any, at: Any) -> Reader | StreamPart:
        if self.is_stream:
            return StreamPart(
                self.training,
                plan.batch,
                self.workers.rank,
                seed=self.config.seed,
                first_step=at.step,
                first_sample=at.samples,
                last_sample=plan.last_sample,
                last_step=plan.steps if plan.by_steps else None,
                in_warmup=plan.in_warmup,
            )
        shard = Shard(
            plan=plan.batch,
            rank=self.place.replica,
            first_step=at.step,
            first_sample=at.samples,
            last_sample=plan.last_sample,
            warmup_samples=plan.warmup_samples,
        )
        order = ShuffledOrder(self.size, self.config.seed, ordering_of(self.training))
        return Reader(self.training, order, shard, self._fetch(TRAINING_DATA, self.training))

    def _eval_source(self, plan: Any, name: str) -> Reader | StreamPart:
        dataset, words = sets_of(self.evaluation)[name], set_words(name)
        if isinstance(dataset, Stream):
            return StreamPart(dataset, plan.eval_batch, self.workers.rank)
        fetch = self._fetch(words, dataset)
        shard = Shard(plan.eval_batch, self.place.replica, 0, 0, len(dataset))
        return Reader(dataset, None, shard, fetch_with_name(fetch, words) if name else fetch)

    def _fetch(self, words: str, dataset: Any) -> Fetch:
        readers = self.readers or Readers({words: dataset}, skip=self.config.on_bad_sample == "skip")
        return readers.fetch_from(words)

    def _feed(self, source: Reader | StreamPart, of_set: str = "") -> Feed:
        if isinstance(source, StreamPart):
            return feed_of(source, self.workers.allgather_object)

        def note(bad: BadSample) -> None:
            if self.place.is_first_stage:
                self.skipped.unreported.append(f"sample {bad.index}{of_set}: {bad.problem}")

        has_processes = self.readers is not None and self.readers.pids
        threads = self.config.read_workers if has_processes else self.config.read_threads
        return Feed(read_ahead(source.__getitem__, len(source), threads), on_bad_sample=note)


def _first(source: Reader | StreamPart) -> HostBatch | None:
    """Return the first batch; of a stream, one that has its first sample in every place."""
    if isinstance(source, Reader):
        return source[0][0] if len(source) else None
    if source.most <= 0:
        return None
    _, real = source.plan.part(source.rank, source.plan.global_batch)
    items = [(0, source.stream.first())] * int(real.sum())
    return source.host_batch(0, 0, items, real, source.plan.global_batch)


def readers_for(config: Config, train_data: Any, eval_data: Any) -> Readers:
    """Start the processes that read this worker's samples, if the config needs some."""
    data = by_words(train_data, eval_data).items()
    given = {words: dataset for words, dataset in data if not isinstance(dataset, Stream)}
    return Readers(given, config.read_workers, skip=config.on_bad_sample == "skip")
