"""hvdtrain: one trainer for PyTorch and TensorFlow (Keras 3) over Horovod.

Public names: :func:`train`, :func:`evaluate`, :func:`load`, :class:`Callback`, :class:`RunContext`,
:class:`Summary`, :class:`Dataset`, :class:`EvalSets`, :func:`as_dataset`, :func:`pad`, :class:`Weighted`,
:class:`SumMetric`, :class:`GatheredMetric` and :class:`MetricObject`. They are loaded on first use, so that
``import hvdtrain`` and ``python -m hvdtrain --help`` load neither a framework nor Horovod.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Dataset",
    "EvalSets",
    "GatheredMetric",
    "MetricObject",
    "RunContext",
    "SumMetric",
    "Summary",
    "Weighted",
    "__version__",
    "as_dataset",
    "evaluate",
    "load",
    "pad",
    "train",
]

_HOMES = {
    "Callback": "hvdtrain.callbacks",
    "Dataset": "hvdtrain.task",
    "EvalSets": "hvdtrain.data.eval_sets",
    "GatheredMetric": "hvdtrain.backends.stateful_metrics",
    "MetricObject": "hvdtrain.backends.metric_objects",
    "RunContext": "hvdtrain.callbacks",
    "SumMetric": "hvdtrain.backends.stateful_metrics",
    "Summary": "hvdtrain.reporting.summary",
    "Weighted": "hvdtrain.backends.counting",
    "as_dataset": "hvdtrain.data.datasets",
    "evaluate": "hvdtrain.jobs.evaluate",
    "pad": "hvdtrain.data.collate",
    "load": "hvdtrain.jobs.load",
    "train": "hvdtrain.jobs.train",
}

if TYPE_CHECKING:
    from hvdtrain.backends.counting import Weighted
    from hvdtrain.backends.metric_objects import MetricObject
    from hvdtrain.backends.stateful_metrics import GatheredMetric, SumMetric
    from hvdtrain.callbacks import Callback, RunContext
    from hvdtrain.data.collate import pad
    from hvdtrain.data.datasets import as_dataset
    from hvdtrain.data.eval_sets import EvalSets
    from hvdtrain.jobs.evaluate import evaluate
    from hvdtrain.jobs.load import load
    from hvdtrain.jobs.train import train
    from hvdtrain.reporting.summary import Summary
    from hvdtrain.task import Dataset


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
