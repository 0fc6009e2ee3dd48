"""Sparse gradients of PyTorch: which there are, and how they are summed. Keras's are made dense."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import horovod.torch as hvd
import torch

# waits for an all-reduce and returns the names of the gradients that are sparse
WaitForNames = Callable[[], set[str]]

_ALL: Mapping[str, Any] = MappingProxyType({})  # among all workers


def zeros_for(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient of zeros; without rows for an optimizer that takes sparse gradients alone."""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return torch.zeros_like(parameter)
    rows, places = parameter.new_zeros((0, *parameter.shape[1:])), torch.zeros((1, 0), dtype=torch.int64)
    shape = parameter.shape
    return torch.sparse_coo_tensor(places.to(rows.device), rows, shape, check_invariants=False)


def agree_on_sparse(
    gradients: Mapping[str, torch.Tensor], name: str, group: Mapping[str, Any] = _ALL
) -> WaitForNames:
    """Collective. Begin to find out which gradients are sparse on any worker; return what waits for it.

    A worker whose samples do not reach an embedding has a dense gradient of zeros, and must take part in the
    same reductions as the others.

    Args:
        gradients: by name, the same names on all workers.
        name: of the all-reduce.
        group: as ``group_of`` returns it.
    """
    flags = [one.is_sparse for one in gradients.values()]
    handle = hvd.allreduce_async_(torch.tensor(flags, dtype=torch.int32), op=hvd.Sum, name=name, **group)
    names = list(gradients)

    def wait() -> set[str]:
        counts = hvd.synchronize(handle).tolist()
        return {name for name, count in zip(names, counts, strict=True) if count}

    return wait


def sum_sparse(
    gradient: torch.Tensor, name: str, group: Mapping[str, Any] = _ALL
) -> Callable[[], torch.Tensor]:
    """Collective. Begin to sum a gradient that is sparse on some worker; return what waits for the sum.

    The rows of all workers are gathered. A worker that has none sends one at the index -1, which is left out,
    so that no message is empty.

    Args:
        gradient: this worker's, sparse or dense.
        name: of the all-gathers.
        group: as ``group_of`` returns it.
    """
    if not gradient.is_sparse:
        gradient = gradient.detach().to_sparse(1)
    shape, indices, values = gradient.shape, gradient._indices().t(), gradient._values()
    if not len(values):
        indices = indices.new_full((1, indices.shape[1]), -1)
        values = values.new_zeros((1, *values.shape[1:]))
    of_indices = hvd.allgather_async(indices.contiguous(), name=f"{name}.indices", **group)
    of_values = hvd.allgather_async(values.contiguous(), name=f"{name}.values", **group)

    def wait() -> torch.Tensor:
        try:
            places = hvd.synchronize(of_indices)
        finally:  # also after a failure: Horovod keeps what nobody waited for
            rows = hvd.synchronize(of_values)
        is_row = places[:, 0] >= 0
        return torch.sparse_coo_tensor(places[is_row].t(), rows[is_row], shape, check_invariants=False)

    return wait
