"""What PyTorch spends on turning gradients into messages and back, without sending them."""

from collections.abc import Callable, Sequence
from typing import cast

import horovod.torch as hvd
import torch

from hvdtrain.backends.base import Backend
from hvdtrain.backends.local_steps import LoneWorker
from hvdtrain.backends.torch.backend import TorchBackend
from hvdtrain.backends.torch.flat import Bucket
from hvdtrain.backends.torch.layouts import SAME
from hvdtrain.backends.torch.low_rank import LowRank
from hvdtrain.backends.torch.model_state import Field
from hvdtrain.bench.predict_ways import GRADIENT
from hvdtrain.errors import UsageError


def check_dense(backend: Backend) -> None:
    """Check that no gradient of the model is sparse.

    Raises:
        UsageError: If one is: what workers exchange then grows with their number, and depends on the data.
    """
    model = cast(TorchBackend, backend).model
    names = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if names:
        raise UsageError(
            f"{names[0]} has sparse gradients, whose messages grow with the workers: no plan predicts them",
            "Plan with sparse=False, or measure with bench --sweep.",
            everywhere=True,
        )


def half_of(shapes: Sequence[tuple[int, ...]], on_gpu: bool) -> Callable[[], None]:
    """Return a function that multiplies gradients, rounds them to fp16 and back, as a job does. Local.

    Args:
        shapes: of the parameters.
        on_gpu: whether they lie on the GPU.
    """
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    bucket = Bucket({"all": torch.empty(numbers, device=_device(on_gpu))})
    bucket.lend()
    bucket.flat.normal_(std=GRADIENT)

    def encode() -> None:
        bucket.flat.copy_(bucket.cast(torch.float16, -1.0))  # a factor with which numbers keep their size
        _wait(on_gpu)

    return encode


def half_sum_of(shapes: Sequence[tuple[int, ...]], on_gpu: bool) -> Callable[[], None]:
    """Return a function that sums gradients over the workers as fp16. It is collective.

    How long it takes depends on the numbers: Gloo converts zeros faster than others. All workers have the
    same ones, and the sum is divided by the workers as in a job, so that the numbers keep their size.

    Args:
        shapes: of the parameters.
        on_gpu: whether they lie on the GPU.
    """
    device = _device(on_gpu)
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    values = torch.randn(numbers, generator=torch.Generator(device).manual_seed(0), device=device)
    small = (GRADIENT * values).to(torch.float16)
    share = 1 / hvd.size()

    def reduce() -> None:
        handle = hvd.allreduce_async_(small, op=hvd.Sum, postscale_factor=share, name="hvdtrain.plan.fp16")
        hvd.synchronize(handle)
        _wait(on_gpu)

    return reduce


def low_rank_of(shapes: Sequence[tuple[int, ...]], rank: int, on_gpu: bool) -> Callable[[], None]:
    """Return a function that does what PowerSGD does with gradients, for one worker alone. Local.

    Args:
        shapes: of the parameters.
        rank: columns of the thin matrices.
        on_gpu: whether they lie on the GPU.
    """
    tensors = [torch.zeros(shape, device=_device(on_gpu)) for shape in shapes]
    names = [str(number) for number in range(len(tensors))]
    fields = [
        Field(name, name, (tensor,), (name,), SAME) for name, tensor in zip(names, tensors, strict=True)
    ]
    reducer = LowRank(LoneWorker(""), fields, rank, 0)
    reducer.attach(dict(zip(names, tensors, strict=True)))
    gradients = [torch.randn_like(tensor) for tensor in tensors]

    def encode() -> None:
        reducer.finish(gradients)
        _wait(on_gpu)

    return encode


def _device(on_gpu: bool) -> torch.device:
    return torch.device("cuda") if on_gpu else torch.device("cpu")


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
