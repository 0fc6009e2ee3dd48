"""What a job needs of data that are streams, and what the plan promises of them."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.config import Config
from hvdtrain.data.eval_sets import TRAINING_DATA, set_words, sets_of
from hvdtrain.data.stream import Stream
from hvdtrain.schedule import Cadence
from hvdtrain.session import Session
from hvdtrain.storage.text import counted


def streams_of(train_data: Any, eval_data: Any) -> dict[str, Stream]:
    """Return the streams among a job's data, by their names in messages."""
    data = {TRAINING_DATA: train_data, **{set_words(name): one for name, one in sets_of(eval_data).items()}}
    return {words: one for words, one in data.items() if isinstance(one, Stream)}


def promises(session: Session, before: Manifest | None) -> str:
    """Return which promises hold for the training data if it is a stream; empty if it is none.

    Args:
        session: the run.
        before: of the checkpoint that the run continues from, if it does.
    """
    stream, config = session.train_data, session.config
    if not isinstance(stream, Stream):
        return ""
    workers = session.backend.workers.size
    parts = _lost_promise(stream, before, config, workers)
    parts.append("each sample once per pass if each pass over the source gives the same")
    if stream.is_dealt(workers):
        parts.append(
            f"{counted(stream.shards, 'shard')} are dealt to {workers} workers, and those whose shards end "
            "first are padded with weight 0; the curve depends on the number of workers"
        )
    elif workers > 1:
        why = f"has {counted(stream.shards, 'shard')}" if stream.shards else "cannot be divided"
        parts.append(
            f"every worker reads all of it, since it {why}, and keeps its part of each step; the order is "
            "the same with any number of workers"
        )
    buffer = stream.shuffle_buffer
    parts.append(f"shuffled within {counted(buffer, 'sample')}" if buffer else "not shuffled")
    parts.append("resumed by reading again what was consumed")
    if stream.length is None:
        late = [name for name in ("save_every", "eval_every") if _goes_by_epochs(getattr(config, name))]
        also = f": give {' and '.join(late)} in steps" if late else ""
        parts.append(f"no length declared: what is due by epochs is due at the end{also}")
    return "; ".join(parts)


def _goes_by_epochs(cadence: Cadence | None) -> bool:
    return cadence is not None and cadence.unit == "epochs"


def _lost_promise(stream: Stream, before: Manifest | None, config: Config, workers: int) -> list[str]:
    """Return a warning if a run goes on with shards that are dealt otherwise than before."""
    if before is None or not (stream.is_dealt(before.workers) or stream.is_dealt(workers)):
        return []
    batch, last = _global_batch(config.model_dump(), workers), _global_batch(before.config, before.workers)
    if (workers, batch) == (before.workers, last):
        return []
    return [
        f"warning: resumed on {counted(workers, 'worker')} with a global batch of {batch} after "
        f"{before.workers} with {last}: of the pass that was begun, some samples may come twice, some never"
    ]


def _global_batch(config: Mapping[str, Any], workers: int) -> int:
    total = config.get("global_batch_size")
    return int(total or workers * int(config.get("batch_size") or 0) * int(config.get("accumulate") or 1))


def is_dealt(session: Session) -> bool:
    """Return whether the training data are a stream whose shards are dealt to the workers."""
    data = session.train_data
    return isinstance(data, Stream) and data.is_dealt(session.backend.workers.size)


def known_size(dataset: Any) -> int | None:
    """Return the number of samples of a data set; of a stream what was declared or counted, or None."""
    if isinstance(dataset, Stream):
        return dataset.length or dataset.seen
    return len(dataset)


def notes_on_streams(config: Config, data: Mapping[str, Any]) -> list[str]:
    """Return what to tell the user of options that have no effect on streams."""
    if config.read_workers and any(isinstance(one, Stream) for one in data.values()):
        return ["read_workers: streams are read by a thread of each worker"]
    return []
