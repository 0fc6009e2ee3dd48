"""PyTorch's parameters divided among the workers; ``reduction/shards.py`` says which numbers are whose."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.reduction.shards import ShardedBucket, shard
from hvdtrain.backends.torch.reduction.broadcast import wait_for_all
from hvdtrain.backends.torch.state.model_state import Entry
from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers

_LARGE = 1 << 15  # numbers: from there on, a message costs less than the copies of joining


@dataclass(frozen=True, eq=False)
class OwnSegment:
    """What this worker owns of one parameter."""

    entry: Entry  # the parameter
    tensor: torch.Tensor  # its part, a vector in the parameter's own memory; what the optimizer updates
    begin: int  # the first of its numbers, in the parameter's memory
    end: int  # the number after its last one
    offset: int  # its offset in the worker's part of the bucket

    def in_part(self, part: torch.Tensor) -> torch.Tensor:
        """Return the segment's place in a vector with the worker's part of the bucket."""
        return part[self.offset : self.offset + self.end - self.begin]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters of one type that are gathered at once."""

    number: int  # its place among the buckets
    layout: ShardedBucket  # which numbers belong to whom
    entries: tuple[Entry, ...]  # the parameters, in the order of the layout
    segments: tuple[OwnSegment, ...]  # what this worker owns

    def zeros(self, numbers: int) -> torch.Tensor:
        """Return a vector of the parameters' type."""
        return torch.zeros(numbers, dtype=self.entries[0].tensor.dtype, device=self.entries[0].tensor.device)

    def part_of(self, values: Callable[[OwnSegment], torch.Tensor]) -> torch.Tensor:
        """Return this worker's part of something that every segment has, zeros where no parameter stands."""
        part = self.zeros(self.layout.part)
        for segment in self.segments:
            segment.in_part(part).copy_(values(segment))
        return part

    def take_gradients(self) -> torch.Tensor:
        """Return a vector with the gradients of the bucket, zeros for none; the parameters lose them."""
        first, length = self.entries[0].tensor, self.layout.length
        flat = torch.empty(length, dtype=first.dtype, device=first.device)
        ends = [*self.layout.begins.values(), length][1:]
        for entry, view, end in zip(self.entries, self.views(flat), ends, strict=True):
            gradient, entry.tensor.grad = entry.tensor.grad, None
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            flat[self.layout.begins[entry.path] + entry.tensor.numel() : end].zero_()  # padding
        return flat

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' places in a vector with the whole bucket, laid out as the parameters."""
        return [
            flat.as_strided(entry.tensor.shape, entry.tensor.stride(), self.layout.begins[entry.path])
            for entry in self.entries
        ]


class ShardedParameters:
    """The trainable parameters of a model, of which every worker updates a part."""

    def __init__(self, trainable: Sequence[Entry], workers: Workers) -> None:
        self.workers = workers
        self.buckets: list[Bucket] = []
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, Entry]] = {}
        for entry in reversed(trainable):
            _make_dense(entry.tensor)
            kinds.setdefault((entry.tensor.dtype, entry.tensor.device), {})[entry.path] = entry
        for (dtype, _), entries in kinds.items():
            sizes = {path: entry.tensor.numel() for path, entry in entries.items()}
            for layout in shard(sizes, workers.size, dtype.itemsize):
                own = [
                    OwnSegment(
                        entries[s.name],
                        memory_of(entries[s.name].tensor)[s.begin : s.end],
                        s.begin,
                        s.end,
                        s.offset,
                    )
                    for s in layout.segments[workers.rank]
                ]
                members = tuple(entries[name] for name in layout.begins)
                self.buckets.append(Bucket(len(self.buckets), layout, members, tuple(own)))
        self._places = [entry.tensor.data_ptr() for entry in self._entries]

    @property
    def segments(self) -> list[OwnSegment]:
        """What this worker owns, in the order of the buckets."""
        return [segment for bucket in self.buckets for segment in bucket.segments]

    def follow(self) -> None:
        """Let the segments follow parameters that have been given other memory."""
        places = [entry.tensor.data_ptr() for entry in self._entries]
        if places == self._places:
            return
        for entry in self._entries:
            _make_dense(entry.tensor)
        for segment in self.segments:
            segment.tensor.data = memory_of(segment.entry.tensor)[segment.begin : segment.end]
        self._places = [entry.tensor.data_ptr() for entry in self._entries]

    @torch.no_grad()
    def gather(self, values: Callable[[OwnSegment], torch.Tensor], name: str) -> None:
        """Collective. Set every parameter, from what each worker has for its segments.

        Over MPI, large segments go from their owners' parameters into those of the others without a copy.
        Over Gloo, whose broadcasts send several times as much, buckets are joined and gathered.
        """
        if self.workers.controller == "MPI":
            for segment in self.segments:
                if (value := values(segment)) is not segment.tensor:
                    segment.tensor.copy_(value)
            self._spread(name)
            return
        for bucket in self.buckets:
            flat = hvd.allgather(bucket.part_of(values), name=f"hvdtrain.{name}.{bucket.number}")
            torch._foreach_copy_([entry.tensor.detach() for entry in bucket.entries], bucket.views(flat))

    @torch.no_grad()
    def gather_on_root(
        self, values: Callable[[OwnSegment], torch.Tensor], name: str
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Collective. Yield each bucket with what all workers have for it; with nothing on ranks but 0.

        Every worker must take all buckets.
        """
        for bucket in self.buckets:
            splits = torch.zeros(self.workers.size, dtype=torch.int32)
            splits[0] = bucket.layout.part
            flat, _ = hvd.alltoall(bucket.part_of(values), splits, name=f"hvdtrain.{name}.{bucket.number}")
            yield bucket, flat

    @torch.no_grad()
    def scatter_from_root(
        self,
        fill: Callable[[Bucket, torch.Tensor], None],
        take: Callable[[OwnSegment, torch.Tensor], None],
        name: str,
    ) -> None:
        """Collective. Give every worker its part of what rank 0 has, one bucket after the other."""
        for bucket in self.buckets:
            flat = bucket.zeros(bucket.layout.length)
            if self.workers.rank == 0:
                fill(bucket, flat)
            hvd.broadcast_(flat, 0, name=f"hvdtrain.{name}.{bucket.number}")
            begin = self.workers.rank * bucket.layout.part
            for segment in bucket.segments:
                take(segment, segment.in_part(flat[begin : begin + bucket.layout.part]))

    def _spread(self, name: str) -> None:
        """Collective. Give every worker the segments of the others, in the parameters' own memory."""
        under_way: list[Any] = []
        small: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
        for bucket in self.buckets:
            entries = {entry.path: entry.tensor for entry in bucket.entries}
            for rank, segments in enumerate(bucket.layout.segments):
                for segment in segments:
                    memory = memory_of(entries[segment.name])[segment.begin : segment.end]
                    if segment.length >= _LARGE:
                        message = f"hvdtrain.{name}.{segment.name}.{segment.begin}"
                        under_way.append(hvd.broadcast_async_(memory, rank, name=message))
                    else:
                        kind = small.setdefault(
                            (memory.dtype, memory.device), [[] for _ in range(self.workers.size)]
                        )
                        kind[rank].append(memory)
        wait_for_all([partial(hvd.synchronize, handle) for handle in under_way])
        for number, ((dtype, device), ranks) in enumerate(small.items()):
            own = ranks[self.workers.rank] or [torch.empty(0, dtype=dtype, device=device)]
            flat = hvd.allgather(torch.cat(own), name=f"hvdtrain.{name}.small.{number}")
            places = [memory for memories in ranks for memory in memories]
            torch._foreach_copy_(places, list(flat.split([len(place) for place in places])))

    @property
    def _entries(self) -> list[Entry]:
        return [entry for bucket in self.buckets for entry in bucket.entries]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor without gaps as a vector, in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _make_dense(parameter: torch.Tensor) -> None:
    """Give a parameter whose memory has gaps other memory."""
    if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
        parameter.data = torch.empty_like(parameter).copy_(parameter.detach())


def make_shards(config: Config, trainable: Sequence[Entry], workers: Workers) -> ShardedParameters | None:
    """Return the parameters, divided among workers as a config requests; None if each updates all of them."""
    return ShardedParameters(trainable, workers) if config.shard != "none" and workers.size > 1 else None
