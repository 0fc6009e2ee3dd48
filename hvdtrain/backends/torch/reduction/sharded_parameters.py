"""PyTorch's parameters divided among the workers, and gradients of which each gets the sum of its part."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.reduction.shards import CommonBucket, CommonShardedParameters, Values
from hvdtrain.backends.torch.reduction.all_reduce import Reducer
from hvdtrain.backends.torch.reduction.broadcast import wait_for_all
from hvdtrain.backends.torch.state.model_state import Entry
from hvdtrain.config.values import compression_of
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers

_LARGE = 1 << 15  # numbers: from there on, a message costs less than the copies of joining


class Bucket(CommonBucket):
    """Parameters of one type that are gathered at once."""

    @property
    def kind(self) -> dict[str, Any]:
        """Type and device of the parameters."""
        first: torch.Tensor = self.entries[0].tensor
        return {"dtype": first.dtype, "device": first.device}

    def by_tensor(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the parameters' places by the identities of these."""
        return {id(e.tensor): view for e, view in zip(self.entries, self.views(flat), strict=True)}

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' places in a vector with the whole bucket, laid out as the parameters."""
        places = [(entry.tensor, self.layout.begins[entry.path]) for entry in self.entries]
        return [flat.as_strided(tensor.shape, tensor.stride(), begin) for tensor, begin in places]


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
                    if len(memory) >= _LARGE:
                        message = f"hvdtrain.{name}.{segment.name}.{segment.begin}"
                        under_way.append(hvd.broadcast_async_(memory, rank, name=message))
                    else:
                        key = memory.dtype, memory.device
                        small.setdefault(key, [[] for _ in range(self.workers.size)])[rank].append(memory)
        wait_for_all([partial(hvd.synchronize, handle) for handle in under_way])
        for number, ((dtype, device), ranks) in enumerate(small.items()):
            own = ranks[self.workers.rank] or [torch.empty(0, dtype=dtype, device=device)]
            flat = hvd.allgather(torch.cat(own), name=f"hvdtrain.{name}.small.{number}")
            places = [memory for memories in ranks for memory in memories]
            torch._foreach_copy_(places, list(flat.split([len(place) for place in places])))

    def _find_places(self) -> list[int]:
        return [entry.tensor.data_ptr() for entry in self.entries]

    def _form_of(self, entry: Entry) -> tuple[Any, ...]:
        _make_dense(tensor := entry.tensor)
        return tensor.numel(), tensor.itemsize, tensor.dtype, tensor.device

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

    def _all_to_all(self, part: torch.Tensor, splits: Any, name: str) -> Any:
        return hvd.alltoall(part, torch.from_numpy(splits), name=name)[0].cpu()

    def _broadcast(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        hvd.broadcast_(flat, 0, name=name)
        return flat

    @torch.no_grad()
    def _set(self, target: torch.Tensor, values: torch.Tensor) -> None:
        target.copy_(values)


class Sharded(Reducer):
    """Sums each worker's part of the gradients, in the order of ranks, when the next bucket is sent."""

    def __init__(self, shards: ShardedParameters, compression: str, scaled: bool = False) -> None:
        super().__init__(shards.workers, scaled)
        self.reached: set[str] = set()  # paths of the parameters that backward passes of this step reached
        self._buckets = shards.buckets
        kind = compression_of(compression).parts_as
        # fp16 would lose digits of parts of a mean over all workers, unless a loss scale has multiplied them
        self._factor = shards.workers.size if kind == "float16" and not scaled else 1
        self._kind: torch.dtype = getattr(torch, kind)
        self._hooks: list[Any] = []
        self._is_in_pass = False
        self._missing: list[set[str]] = []  # of each bucket, what the backward pass has not completed
        self._sent: dict[int, tuple[Any, int]] = {}  # of buckets: handle, and what multiplied the numbers
        self._sums: list[torch.Tensor] = []

    @property
    def is_attached(self) -> bool:
        """Whether backward passes belong to a step."""
        return bool(self._hooks)

    def attach(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Watch the parameters; none, if backward passes that follow belong to no step."""
        super().attach(parameters)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._is_in_pass = [], False
        self._sent.clear()
        for bucket in self._buckets if parameters else ():
            for entry in bucket.entries:
                complete = partial(self._complete, bucket, entry.path)
                self._hooks.append(entry.tensor.register_post_accumulate_grad_hook(complete))

    def follow(self, in_warmup: bool = False, passes: int = 1) -> None:
        """Begin the sums of the next step. Local: no collective."""
        self.reached = set()
        self._sent.clear()
        self._sums = [torch.zeros(bucket.layout.part, **bucket.kind) for bucket in self._buckets]

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """Collective, if it belongs to a step. Return a context for a backward pass."""
        if not self._hooks:
            yield
            return
        self._missing = [{entry.path for entry in bucket.entries} for bucket in self._buckets]
        self._is_in_pass = True
        try:
            yield
        finally:
            self._is_in_pass = False
        for bucket in self._buckets:
            if self._missing[bucket.number]:  # which the pass has not reached
                self._missing[bucket.number].clear()
                self._send(bucket)

    def _sum(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return this worker's parts of the sums, when all have come."""
        for bucket in self._buckets:
            self._receive(bucket)
        sums, self._sums = self._sums, []
        return sums

    def _complete(self, bucket: Bucket, path: str, _: torch.Tensor) -> None:
        """Take a gradient as complete; a hook of the parameter."""
        if not self._is_in_pass:
            return
        missing = self._missing[bucket.number]
        if path not in missing:
            raise TaskError(
                f"the gradient of {path} grew after it was complete",
                "A step calls backward once for each micro-batch; leave it out of the task.",
            )
        missing.remove(path)
        self.reached.add(path)
        if not missing:
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        """Begin to send the gradients of a bucket, zeros for none, and drop them."""
        self._receive(bucket)  # of the micro-batch before
        flat, factor = torch.zeros(bucket.layout.length, **bucket.kind), 1
        for entry, view in zip(bucket.entries, bucket.views(flat), strict=True):
            gradient, entry.tensor.grad = entry.tensor.grad, None
            if gradient is not None:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if flat.dtype == torch.float32 and self._kind != torch.float32:
            factor = self._factor
            flat = (flat.mul_(factor) if factor != 1 else flat).to(self._kind).view(torch.int16)
        handle = hvd.alltoall_async(flat, name=f"hvdtrain.gradients.{bucket.number}")
        others = list(self._sent)
        self._sent[bucket.number] = handle, factor
        for other in others:  # each takes the memory of its bucket twice
            self._receive(self._buckets[other])

    def _receive(self, bucket: Bucket) -> None:
        """Wait for what a bucket receives, if it was sent, and add it to this worker's part of the sums."""
        if bucket.number not in self._sent:
            return
        handle, factor = self._sent.pop(bucket.number)
        received, _ = hvd.synchronize(handle)
        kind = bucket.kind["dtype"]
        if received.dtype == torch.int16:
            received = received.view(self._kind)
        total = self._sums[bucket.number]
        for part in received.view(self._workers.size, bucket.layout.part):
            total += part.to(kind) if factor == 1 else part.to(kind).div_(factor)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor without gaps as a vector, in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _make_dense(parameter: torch.Tensor) -> None:
    """Give a parameter whose memory has gaps other memory."""
    if parameter.stride() != torch.empty_like(parameter, device="meta").stride():
        parameter.data = torch.empty_like(parameter).copy_(parameter.detach())
