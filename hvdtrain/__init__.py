"""hvdtrain: one trainer for PyTorch and TensorFlow (Keras 3) over Horovod.

Public names: :func:`train`, :func:`evaluate`, :class:`Summary`, :class:`Dataset` and :func:`as_dataset`.
They are loaded on first use, so that ``import hvdtrain`` and ``python -m hvdtrain --help`` load
neither a framework nor Horovod.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Dataset", "Summary", "__version__", "as_dataset", "evaluate", "train"]

_HOMES = {
    "Dataset": "hvdtrain.task",
    "Summary": "hvdtrain.summary",
    "as_dataset": "hvdtrain.data.datasets",
    "evaluate": "hvdtrain.evaluation",
    "train": "hvdtrain.job",
}

if TYPE_CHECKING:
    from hvdtrain.data.datasets import as_dataset
    from hvdtrain.evaluation import evaluate
    from hvdtrain.job import train
    from hvdtrain.summary import Summary
    from hvdtrain.task import Dataset


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
