"""PyTorch's parameters divided among the workers; ``reduction/shards.py`` says which numbers are whose."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.reduction.shards import CommonBucket, CommonShardedParameters, Values
from hvdtrain.backends.torch.reduction.broadcast import wait_for_all
from hvdtrain.backends.torch.state.model_state import Entry
from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers

_LARGE = 1 << 15  # numbers: from there on, a message costs less than the copies of joining


class Bucket(CommonBucket):
    """Parameters of one type that are gathered at once."""

    @property
    def kind(self) -> dict[str, Any]:
        """Type and device of the parameters."""
        first: torch.Tensor = self.entries[0].tensor
        return {"dtype": first.dtype, "device": first.device}

    def take_gradients(self) -> torch.Tensor:
        """Return a vector with the gradients of the bucket, zeros for none; the parameters lose them."""
        flat = torch.zeros(self.layout.length, **self.kind)
        for entry, view in zip(self.entries, self.views(flat), strict=True):
            gradient, entry.tensor.grad = entry.tensor.grad, None
            if gradient is not None:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        return flat

    def by_tensor(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the parameters' places by the identities of these."""
        return {id(e.tensor): view for e, view in zip(self.entries, self.views(flat), strict=True)}

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' places in a vector with the whole bucket, laid out as the parameters."""
        return [
            flat.as_strided(entry.tensor.shape, entry.tensor.stride(), self.layout.begins[entry.path])
            for entry in self.entries
        ]


class ShardedParameters(CommonShardedParameters):
    """The trainable parameters of a model, of which every worker updates a part."""

    bucket = Bucket

    def __init__(self, trainable: Sequence[Entry], workers: Workers) -> None:
        super().__init__(trainable, workers)
        self._places = self._find_places()

    def follow(self) -> None:
        """Let the segments follow parameters that have been given other memory."""
        if self._find_places() == self._places:
            return
        for entry in self.entries:
            _make_dense(entry.tensor)
        for segment in self.segments:
            segment.tensor.data = self._vector_of(segment.entry, segment.begin, segment.end)
        self._places = self._find_places()

    @torch.no_grad()
    def gather(self, values: Values, name: str) -> None:
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
            flat = hvd.allgather(self._part_of(bucket, values), name=f"hvdtrain.{name}.{bucket.number}")
            torch._foreach_copy_([entry.tensor.detach() for entry in bucket.entries], bucket.views(flat))

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

    def _find_places(self) -> list[int]:
        return [entry.tensor.data_ptr() for entry in self.entries]

    def _kind_of(self, entry: Entry) -> tuple[Any, ...]:
        _make_dense(entry.tensor)
        return entry.tensor.itemsize, entry.tensor.dtype, entry.tensor.device

    def _length_of(self, entry: Entry) -> int:
        return entry.tensor.numel()

    def _vector_of(self, entry: Entry, begin: int, end: int) -> torch.Tensor:
        return memory_of(entry.tensor)[begin:end]

    def _copies(self) -> list[torch.Tensor]:
        return [entry.tensor.detach().clone() for entry in self.entries]

    @torch.no_grad()
    def _restore(self, copies: list[torch.Tensor]) -> None:
        torch._foreach_copy_([entry.tensor.detach() for entry in self.entries], copies)

    @torch.no_grad()
    def _part_of(self, bucket: Bucket, values: Values) -> torch.Tensor:
        part = torch.zeros(bucket.layout.part, **bucket.kind)
        for segment in bucket.segments:
            segment.in_part(part).copy_(values(segment))
        return part

    def _zeros_of(self, bucket: Bucket) -> torch.Tensor:
        return torch.zeros(bucket.layout.length, **bucket.kind)

    def _all_to_all(self, part: torch.Tensor, splits: Any, name: str) -> torch.Tensor:
        received: torch.Tensor = hvd.alltoall(part, torch.from_numpy(splits), name=name)[0]
        return received.cpu()

    def _broadcast(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        hvd.broadcast_(flat, 0, name=name)
        return flat

    @torch.no_grad()
    def _set(self, target: torch.Tensor, values: torch.Tensor) -> None:
        target.copy_(values)


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
