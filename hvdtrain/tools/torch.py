"""What tools do with PyTorch: a worker alone, and all-reduces as a step calls them."""

from collections.abc import Callable
from typing import Any, cast

import horovod.torch as hvd
import torch

from hvdtrain.backends.base import Backend
from hvdtrain.backends.torch.backend import TorchBackend
from hvdtrain.backends.torch.reduction.flat import flat_zeros
from hvdtrain.backends.torch.task_model import choose_device
from hvdtrain.backends.workers import HorovodWorkers
from hvdtrain.config import Config
from hvdtrain.errors import UsageError
from hvdtrain.workers.agreement import Workers


def backend_alone(config: Config, job: Backend, alone: Workers) -> Backend:
    """Return a backend on the device of the job's, whose steps have no collective. Local: no collective."""
    backend: Backend = TorchBackend(alone, choose_device(config.device, cast(HorovodWorkers, job.workers)))
    return backend


def count_gpus() -> int:
    """Return how many GPUs PyTorch sees."""
    return torch.cuda.device_count()


def check_dense(backend: Any) -> None:
    """Check that no gradient of the model is sparse."""
    modules = backend.model.named_modules()
    names = [name for name, module in modules if getattr(module, "sparse", False) is True]
    if names:
        raise UsageError(
            f"{names[0]} has sparse gradients, whose messages grow with the workers: no plan predicts them",
            "Plan with sparse=False, or measure with bench --sweep.",
            everywhere=True,
        )


def all_reduce_of(size: int, on_gpu: bool) -> Callable[[], None]:
    """Return a function that sums a tensor over the workers, and waits for the sum. It is collective."""
    tensor = flat_zeros(size // 4, torch.float32, torch.device("cuda") if on_gpu else torch.device("cpu"))
    name = f"hvdtrain.bench.{size}"

    def reduce() -> None:
        hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name=name))
        if on_gpu:
            torch.cuda.synchronize()

    return reduce
