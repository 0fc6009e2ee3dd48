"""Memory of the GPU that a PyTorch job computes on."""

import torch


def device_peak_bytes() -> int | None:
    """Return the most memory that tensors have had on this worker's GPU; None without a GPU."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None
