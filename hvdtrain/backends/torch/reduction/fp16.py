"""Gradients of PyTorch that travel as fp16."""

import torch

from hvdtrain.backends.torch.reduction.all_reduce import AllReduce


class Fp16(AllReduce):
    """All-reduces of gradients as fp16: half the bytes of fp32.

    Each gradient is multiplied by the number of workers before it is cast, and the sum is divided by it:
    gradients are parts of the mean over all workers, which get smaller as workers are added, and fp16 has
    few digits below 6e-5. For powers of two this changes nothing else. A loss scale has multiplied them
    already.
    """

    carries = False
    sent_as = "as fp16"

    def _cast_for(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        return torch.float16, 1 if self._scaled else self._workers.size
