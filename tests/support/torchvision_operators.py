"""PyTorch's CPU build beside the torchvision of the Python package index, which is for the CUDA build.

Its library of operators cannot be loaded then, and importing the package fails, because it declares what two
of the operators return for tensors without data. Nothing here uses them, so tests declare the two.
"""

import importlib.util
from pathlib import Path
from typing import Any

from support.cases import command_line

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def command_line_with_torchvision(words: list[str]) -> int:
    """Do what ``python -m hvdtrain`` does with these words, in a pool; return its exit code."""
    if words[words.index("--framework") + 1] == "torch":
        declare_operators()
    return command_line(words)


def declare_operators() -> None:
    """Make torchvision importable, if it is installed, with its operators if they can be loaded."""
    import torch

    found = importlib.util.find_spec("torchvision")
    if found is None:
        return
    try:
        torch.ops.load_library(Path(str(found.origin)).with_name("_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", _SIGNATURE)


def load_torchmetrics() -> Any:
    """Import torchmetrics, which imports torchvision if it is installed."""
    declare_operators()
    import torchmetrics

    return torchmetrics
