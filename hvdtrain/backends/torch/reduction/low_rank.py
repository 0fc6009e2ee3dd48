"""PowerSGD in PyTorch: gradients travel as two thin matrices, and what they leave out travels later."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor

from hvdtrain.backends.reduction.low_rank import CommonLowRank, first_factor, matrix_shape, orthonormal
from hvdtrain.backends.torch.reduction.all_reduce import Reducer
from hvdtrain.backends.torch.reduction.broadcast import broadcast_tensors, wait_for_all
from hvdtrain.backends.torch.reduction.flat import laid_out_as
from hvdtrain.backends.torch.state.model_state import Field

Tensors = Sequence[Tensor]


class LowRank(CommonLowRank, Reducer):
    """Sums gradients over workers as matrices of low rank, as ``reduction/low_rank.py`` says."""

    _compresses = True

    def follow(self, in_warmup: bool = False, passes: int = 1) -> None:
        """Compress the gradients of the next step unless it lies in the learning rate's warm-up. Local."""
        self._compresses = not in_warmup

    def broadcast(self, root: int) -> None:
        """Collective. Copy what the root keeps to every worker."""
        broadcast_tensors(self.tensors.values(), root, label="reducer")

    def _read(self, name: str, tensor: Tensor, is_part: bool) -> Any:
        if is_part and self._workers.size > 1:
            hvd.allreduce_(_dense(tensor), op=hvd.Sum, name=f"hvdtrain.{name}")
        array = tensor.cpu().numpy().copy()
        if is_part:
            tensor.div_(self._workers.size)
        return array

    def _set(self, tensor: Tensor, values: Any) -> None:
        tensor.copy_(torch.from_numpy(values))

    def _make_matrices(self, fields: list[Field], seed: int) -> None:
        by_tensor: dict[Tensor, list[Field]] = {}
        for field in fields:
            for tensor in field.tensors:
                by_tensor.setdefault(tensor, []).append(field)
        self._sizes = {id(tensor): tensor.nbytes for tensor in by_tensor}
        self._matrices = {
            id(tensor): [_Matrix(field, self._rank, seed) for field in parts]
            for tensor, parts in by_tensor.items()
            if tensor.dtype == torch.float32
            and all(len(f.tensors) == 1 and matrix_shape(f.shape, self._rank) for f in parts)
        }
        self._all = [matrix for matrices in self._matrices.values() for matrix in matrices]

    @torch.no_grad()
    def finish(self, gradients: Tensors, vector: Tensor | None = None) -> tuple[list[Tensor], Any]:
        """Collective. Return the sums of low rank; sum a vector in place, which is in the last message."""
        # the vector is in the last message: errors and Q change when all sums of a step have succeeded
        vectors = () if vector is None else (vector,)
        gradients = [(g.to_dense() if g.is_sparse else g).contiguous() for g in gradients]
        tensors = list(self._parameters.values())
        places = zip(tensors, gradients, strict=True)
        pairs = [(m, gradient) for tensor, gradient in places for m in self._matrices.get(id(tensor), ())]
        others = [g for t, g in zip(tensors, gradients, strict=True) if id(t) not in self._matrices]
        factor = 1.0 if self._loss_scale is None else float(self._loss_scale.factor)
        for matrix, gradient in pairs:
            torch.add(matrix.take(gradient), matrix.error, alpha=factor, out=matrix.moment)
        if self._compresses and self._all:
            sent, factors = self._reduce_compressed(others, vectors)
        else:
            whole = [_dense(matrix.moment) for matrix in self._all]
            sent, factors = self._sum_all("uncompressed", [*whole, *others], vectors), []
        for matrix, gradient in pairs:
            matrix.put(gradient)
        found = [laid_out_as(t, gradient) for t, gradient in zip(tensors, gradients, strict=True)]
        if bool(torch.stack([torch.isfinite(tensor).all() for tensor in sent]).all()):
            self._keep(factors, factor)
        return found, vector

    def _reduce_compressed(self, others: Tensors, vectors: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. Leave the sums in ``total``; return what was reduced, and the sums of the Q_i."""
        left = [matrix.moment @ matrix.q for matrix in self._all]
        sent = self._sum_all("p", [*left, *others])
        found = _orthonormal(left)
        right = []
        for matrix, p in zip(self._all, found, strict=True):
            own = matrix.moment.T @ p
            matrix.moment.addmm_(p, own.T, alpha=-1)  # what this worker's part leaves out
            right.append(own)
        sent += self._sum_all("q", right, vectors)
        for matrix, p, q in zip(self._all, found, right, strict=True):
            matrix.total = p, q
        return sent, right

    def _sum_all(self, what: str, tensors: Tensors, vectors: Tensors = ()) -> list[Tensor]:
        """Collective. Sum tensors and vectors over workers in place by one message for each type."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in (*tensors, *vectors):
            by_type.setdefault(tensor.dtype, []).append(tensor)
        flat = [torch.cat([tensor.view(-1) for tensor in part]) for part in by_type.values()]
        rest = {kind: sum(v.numel() for v in vectors if v.dtype == kind) for kind in by_type}
        of_gradients = [message[: len(message) - rest[message.dtype]] for message in flat]
        if self._workers.size == 1:
            return of_gradients
        if self.clock is not None:
            self.clock.ready()
        name = f"hvdtrain.low_rank.{what}"
        handles = [hvd.allreduce_async_(one, op=hvd.Sum, name=f"{name}.{one.dtype}") for one in flat]
        wait_for_all([partial(hvd.synchronize, handle) for handle in handles])
        if self.clock is not None:
            (self.clock.resumed if what == "p" else self.clock.reduced)()
        for message, part in zip(flat, by_type.values(), strict=True):
            for tensor, values in zip(part, torch.split(message, [t.numel() for t in part]), strict=True):
                tensor.view(-1).copy_(values)
        return of_gradients

    def _keep(self, factors: Tensors, factor: float) -> None:
        """Take the errors and Q of a step of which all has been reduced, and the gradients are finite."""
        if not factors:
            for matrix in self._all:
                matrix.error.zero_()
            return
        found = _orthonormal(factors, [matrix.first for matrix in self._all])
        for matrix, q in zip(self._all, found, strict=True):
            matrix.error, matrix.moment, matrix.q = matrix.moment, matrix.error, q
            if factor != 1:
                matrix.error.div_(factor)


class _Matrix:
    """One portable array of a gradient as a matrix, and what is kept of it from step to step."""

    def __init__(self, field: Field, rank: int, seed: int) -> None:
        shape = matrix_shape(field.shape, rank)
        assert shape is not None  # those without one travel as they are
        (tensor,) = field.tensors
        self.path, self.portable_shape, self.shape = field.path, field.shape, shape
        # where the portable array's numbers lie in the tensor in C order: strides and offset, or indices
        base = np.arange(tensor.numel(), dtype=np.int64).reshape(tuple(tensor.shape))
        portable = field.layout.to_portable([base if field.rows is None else base[field.rows]])
        self._strides: tuple[tuple[int, ...], int] | None = None
        if np.shares_memory(portable, base):
            strides = tuple(stride // base.itemsize for stride in portable.strides)
            self._strides = strides, int(portable.flat[0])
        else:
            order = torch.from_numpy(np.ascontiguousarray(portable).reshape(-1))
            self._order = order.to(tensor.device)
        # what this worker has not sent yet, and room for the gradient plus that, whose rest is the next error
        self.error = torch.zeros_like(self.take(tensor.detach().contiguous()))
        self.moment = torch.zeros_like(self.error)
        self.first = first_factor(field.path, shape[1], rank, seed)
        self.q = torch.tensor(self.first, device=tensor.device)
        # P and Q, whose product the sum over workers is; None if that is in ``moment``
        self.total: tuple[Tensor, Tensor] | None = None

    def take(self, gradient: Tensor) -> Tensor:
        """Return the matrix of a gradient, as a view where its layout allows one."""
        if self._strides is None:
            return gradient.reshape(-1)[self._order].view(self.shape)
        return self._view(gradient).reshape(self.shape)

    def put(self, gradient: Tensor) -> None:
        """Write the sum over workers into a gradient."""
        total, self.total = self.total, None
        matrix = self.moment if total is None else total[0] @ total[1].T
        if self._strides is None:
            gradient.view(-1)[self._order] = matrix.reshape(-1)
        else:
            self._view(gradient).copy_(matrix.reshape(self.portable_shape))

    def _view(self, gradient: Tensor) -> Tensor:
        strides, offset = self._strides or ((), 0)
        return gradient.as_strided(self.portable_shape, strides, gradient.storage_offset() + offset)


def _dense(matrix: Tensor) -> Tensor:
    """Return a matrix whose memory has no gaps so that it is contiguous: itself or its transpose."""
    return matrix if matrix.is_contiguous() else matrix.T


def _orthonormal(matrices: Tensors, refill: Sequence[Any] | None = None) -> list[Tensor]:
    found = orthonormal([matrix.cpu().numpy() for matrix in matrices], refill)
    return [torch.from_numpy(array).to(m.device) for array, m in zip(found, matrices, strict=True)]
