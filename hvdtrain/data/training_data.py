"""The data of a run behind one interface: data sets, whose samples have numbers, and streams."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hvdtrain.config import Config
from hvdtrain.data.eval_sets import TRAINING_DATA, by_words, fetch_with_name, set_words, sets_of
from hvdtrain.data.feed import Feed, HostBatch, Reader, Shard
from hvdtrain.data.fingerprint import Fingerprint
from hvdtrain.data.order import Order, SequentialOrder, training_order
from hvdtrain.data.readers import BadSample, Readers
from hvdtrain.data.stream import Stream
from hvdtrain.data.stream_feed import StreamFeed, StreamPart
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
        if self.is_stream:
            return StreamFeed(self._train_part(plan, at), self.workers.allgather_object)
        return self._feed(self._train_reader(plan, at))

    def train_batch(self, plan: Any, at: Any) -> HostBatch | None:
        """Read this worker's batch of the step that begins at a place; of a stream, of its first sample."""
        if self.is_stream:
            is_over = at.samples >= plan.last_sample
            return None if is_over else _of_first_sample(self._train_part(plan, at))
        return _first(self._train_reader(plan, at))

    def batch_again(self, plan: Any, at: Any) -> HostBatch | None:
        """Read the batch of a step that is done again; None of a stream, which is read once."""
        return None if self.is_stream else self.train_batch(plan, at)

    def eval_feed(self, plan: Any, name: str = "") -> Feed:
        """Return this worker's shard of the evaluation data, or of one of their sets, once."""
        dataset = sets_of(self.evaluation)[name]
        if isinstance(dataset, Stream):
            part = StreamPart(dataset, plan.eval_batch, self.workers.rank)
            return StreamFeed(part, self.workers.allgather_object)
        return self._feed(self._eval_reader(plan, name), f" of the {set_words(name)}" if name else "")

    def eval_batch(self, plan: Any, name: str = "") -> HostBatch | None:
        """Read this worker's first batch of the evaluation data, or of one of their sets."""
        dataset = sets_of(self.evaluation)[name]
        if isinstance(dataset, Stream):
            return _of_first_sample(StreamPart(dataset, plan.eval_batch, self.workers.rank))
        return _first(self._eval_reader(plan, name))

    def skipped_in(self, feed: Feed, step: int | None = None) -> tuple[int, float]:
        """Return the samples that this worker skipped since the last call, and the seconds it waited."""
        skipped, waited_seconds = feed.take_notes(step)
        # workers of one replica read the same samples: the one of the first stage counts them
        return (skipped if self.place.is_first_stage else 0), waited_seconds

    def _train_reader(self, plan: Any, at: Any) -> Reader:
        order = training_order(self.training, self.size, self.config.seed)
        shard = Shard(
            plan=plan.batch,
            rank=self.place.replica,
            first_step=at.step,
            first_sample=at.samples,
            last_sample=plan.last_sample,
            warmup_samples=plan.warmup_samples,
        )
        return self._reader(TRAINING_DATA, self.training, order, shard)

    def _train_part(self, plan: Any, at: Any) -> StreamPart:
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

    def _eval_reader(self, plan: Any, name: str) -> Reader:
        dataset = sets_of(self.evaluation)[name]
        shard = Shard(plan.eval_batch, self.place.replica, 0, 0, len(dataset))
        order = SequentialOrder(len(dataset))
        return self._reader(set_words(name), dataset, order, shard, is_named=bool(name))

    def _reader(self, words: str, dataset: Any, order: Order, shard: Shard, is_named: bool = False) -> Reader:
        readers = self.readers or Readers({words: dataset}, skip=self.config.on_bad_sample == "skip")
        fetch = readers.fetch_from(words)
        if is_named:
            fetch = fetch_with_name(fetch, words)
        return Reader(dataset, order, shard, fetch, replaces=words == TRAINING_DATA)

    def _feed(self, reader: Reader, of_set: str = "") -> Feed:
        def note(bad: BadSample) -> None:
            if self.place.is_first_stage:
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
    """Start the processes that read this worker's samples, if the config needs some."""
    data = by_words(train_data, eval_data).items()
    given = {words: dataset for words, dataset in data if not isinstance(dataset, Stream)}
    return Readers(given, config.read_workers, skip=config.on_bad_sample == "skip")
