"""torchmetrics beside a torchvision that was compiled for another build of PyTorch."""

import sys
from typing import Any

_OPERATORS = ("nms", "qnms")
_LIBRARIES: list[Any] = []


def load_torchmetrics() -> Any:
    """Import torchmetrics, which imports torchvision if it is installed.

    PyPI's torchvision is compiled for CUDA. Beside the CPU's PyTorch its operators are missing, and its
    import fails when it registers their shapes: the operators are declared here.
    """
    import torch

    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
        for module in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[module]
    import torchmetrics

    return torchmetrics
