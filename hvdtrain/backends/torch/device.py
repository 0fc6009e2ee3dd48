"""Which device a PyTorch worker computes on."""

import torch

from hvdtrain.backends.base import DeviceMemory
from hvdtrain.backends.workers import HorovodWorkers
from hvdtrain.errors import EnvironmentFault


def choose_device(wanted: str, workers: HorovodWorkers) -> torch.device:
    """Return the device of this worker, chosen by its rank on the host. Local: no collective.

    Args:
        wanted: "auto", "cpu" or "gpu".
        workers: the job's workers.

    Raises:
        EnvironmentFault: If there is no GPU, or not one for each worker of the host.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EnvironmentFault(
            f"--device gpu: PyTorch {torch.__version__} sees no GPU on {workers.host}",
            "Use --device cpu, or install a driver and a CUDA build of PyTorch.",
        )
    cards = torch.cuda.device_count()
    if workers.local_rank >= cards:
        raise EnvironmentFault(
            f"{workers.host} has {cards} GPUs for {workers.local_size} workers; each worker needs one",
            f"Start at most {cards} workers on this host, or use --device cpu.",
        )
    return torch.device("cuda", workers.local_rank)


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU; None on the CPU."""
    if device.type != "cuda":
        return None
    _, limit = torch.cuda.mem_get_info(device)
    return DeviceMemory(int(torch.cuda.max_memory_allocated(device)), limit)
