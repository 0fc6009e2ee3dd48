"""Rows of all workers in PyTorch; ``tensorflow/objective/gathering.py`` does the same for TensorFlow."""

from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hvdtrain.backends.objective import gathering
from hvdtrain.backends.objective.gathering import refuse_horovods_own
from hvdtrain.backends.objective.stateful_metrics import Collectives

_Allgather: Any = mpi_ops.HorovodAllgather


class Gathering(gathering.Gathering):
    """Gathers rows for PyTorch's losses."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather(self, tensor: Tensor, name: str) -> tuple[Tensor, Tensor]:
        counted = self._weights > 0
        any_counts, sent = bool(counted.any()), tensor
        if any_counts and len(tensor) == len(counted):
            sent = tensor[counted]
        if self._workers.size > 1:
            sent = sent if any_counts else sent[:0]
            counts = _joined(torch.tensor([len(sent)]), f"{name}.rows").tolist()
            gathered, first = _Gather.apply(sent, name, counts), sum(counts[: self._workers.rank])  # type: ignore[no-untyped-call]
            if not any_counts:  # samples of weight 0 are compared with something, too
                gathered, first = torch.cat((gathered, tensor)), len(gathered)
        else:
            gathered, first = sent, 0
        own = torch.arange(len(tensor), device=tensor.device) + first
        return gathered, own.clamp(max=max(0, len(gathered) - 1))


class _Gather(Function):
    """The rows of all workers. Its backward pass sums what all workers give to this worker's rows.

    The gradient of a step is the sum over workers of the gradients of their losses, so that is exact.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, name: str, counts: list[int]) -> Tensor:
        """Collective. Return the rows of all workers."""
        ctx.name, ctx.counts = name, counts
        return _joined(_as_sent(rows), name).view(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Collective. Return the gradient of this worker's rows."""
        splits = torch.tensor(ctx.counts, dtype=torch.int32)
        received, _ = hvd.alltoall(_as_sent(gradient), splits, name=f"{ctx.name}.backward")
        shape = len(ctx.counts), ctx.counts[hvd.rank()], *gradient.shape[1:]
        return received.view(gradient.dtype).reshape(shape).sum(0), None, None


def _as_sent(rows: Tensor) -> Tensor:
    """Return rows, or their bits as a type that Horovod takes: no booleans, and on GPUs no bf16."""
    kinds = {torch.bool: torch.uint8, torch.bfloat16: torch.int16}
    return rows.resolve_neg().contiguous().view(kinds.get(rows.dtype, rows.dtype))


def _joined(rows: Tensor, name: str) -> Tensor:
    """Collective. Return the workers' rows in the order of ranks."""
    return mpi_ops.synchronize(mpi_ops.allgather_async(rows, name))


class _Checked(_Allgather):
    """Horovod's allgather, which in a loss of several workers is refused."""

    @classmethod
    def apply(cls, tensor: Tensor, name: str | None, process_set: Any) -> Any:
        """Collective. Return the rows of all workers."""
        refuse_horovods_own(process_set is mpi_ops.global_process_set)
        return _Allgather.apply(tensor, name, process_set)


mpi_ops.HorovodAllgather = _Checked
# Horovod keeps the operations that this worker began and has not waited for
COLLECTIVES = partial(
    Collectives, hvd=hvd, to_tensor=torch.from_numpy, is_under_way=lambda: bool(mpi_ops._handle_map)
)
