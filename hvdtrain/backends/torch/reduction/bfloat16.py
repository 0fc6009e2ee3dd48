"""Gradients of PyTorch that travel as bf16; ``tensorflow/reduction/bfloat16.py`` does the same for Keras.

Horovod 0.28.1 sums no bf16, over MPI, Gloo or NCCL: what travels are its bits.
"""

from collections.abc import Mapping, Sequence

import horovod.torch as hvd
import torch

from hvdtrain.backends.torch.reduction.all_reduce import agree_on_sparse, sum_sparse
from hvdtrain.backends.torch.reduction.flat import as_reals
from hvdtrain.backends.torch.reduction.reducer import Reducer
from hvdtrain.backends.workers import Sized


class BFloat16(Reducer):
    """Sums gradients over workers in fp32, which come and go as bf16: half the bytes of fp32.

    Each worker gets an equal part of all workers' gradients, adds it up and gives the sum to all. So a number
    is rounded twice, to 8 bits each time, at any number of workers: as a part of the mean and as the sum.
    bf16 has the range of fp32, so that nothing is multiplied before it is rounded.

    Args:
        workers: the job's workers, whose number is fixed.
        scaled: whether a loss scale has multiplied the gradients, which changes nothing here.
    """

    def __init__(self, workers: Sized, scaled: bool = False) -> None:
        super().__init__(workers, scaled)
        self._sparse: set[str] | None = None  # names of sparse gradients; None until a step has shown them

    def attach(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the parameters; nothing begins before the backward pass ends."""
        super().attach(parameters)
        self._sparse = None

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        return "fp32, sent as bf16"

    @torch.no_grad()
    def _sum(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return the sums; those of fp16 and fp64, and sparse ones, travel as they are.

        Gradients that are sparse in the first step, on any worker, stay so; others are made dense.
        """
        names = list(self._parameters)
        name = f"hvdtrain.bf16.{names[0]}"
        given = dict(zip(names, gradients, strict=True))
        if self._sparse is None:
            self._sparse = agree_on_sparse(given, f"{name}.sparse")()
        gradients = [g.to_dense() if g.is_sparse and n not in self._sparse else g for n, g in given.items()]
        found = list(gradients)
        rounded = []
        for index, gradient in enumerate(gradients):
            if names[index] in self._sparse:
                found[index] = sum_sparse(gradient, f"{name}.{index}")()
            elif as_reals(gradient).dtype in (torch.float32, torch.bfloat16):
                rounded.append(index)
            else:
                found[index] = hvd.allreduce(gradient, op=hvd.Sum, name=f"{name}.{index}")
        if rounded:
            given_numbers = [as_reals(gradients[i]).float() for i in rounded]
            sums = self._sum_rounded(torch.cat([numbers.reshape(-1) for numbers in given_numbers]), name)
            parts = torch.split(sums, [numbers.numel() for numbers in given_numbers])
            for index, numbers, part in zip(rounded, given_numbers, parts, strict=True):
                kind, total = gradients[index].dtype, part.view(numbers.shape)
                total = torch.view_as_complex(total) if kind.is_complex else total.to(kind)
                found[index] = laid_out_as(self._parameters[names[index]], total)
        return found

    def _sum_rounded(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Collective. Return the sum over workers of a vector that travels as bf16."""
        size = self._workers.size
        padded = torch.nn.functional.pad(values, (0, -len(values) % size))
        received = hvd.alltoall(padded.to(torch.bfloat16).view(torch.int16), name=name)
        own = received.view(torch.bfloat16).view(size, -1).to(torch.float32).sum(0)
        gathered = hvd.allgather(own.to(torch.bfloat16).view(torch.int16), name=f"{name}.sum")
        total: torch.Tensor = gathered.view(torch.bfloat16).to(torch.float32)[: len(values)]
        return total


def laid_out_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with its numbers where the parameter has its own: fused optimizers count on that."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)
