"""hvdtrain: one trainer for PyTorch and TensorFlow (Keras 3) over Horovod.

What can be called: :func:`train`, :func:`evaluate`, :func:`predict`, :func:`load`, :func:`export`,
:func:`import_weights`, :func:`lr_find`, and :func:`launch`, which starts workers from a notebook or a script.
What goes in and comes out: :class:`Summary`, :class:`Callback`, :class:`RunContext`, :class:`Dataset`,
:class:`EvalSets`, :func:`as_dataset`, :func:`open_parquet`, :func:`stream`, :func:`pad`,
:func:`all_gather`, :class:`Block`, :class:`Weighted`, :class:`SumMetric`,
:class:`GatheredMetric`, :class:`MetricObject`, :class:`TrainOptions`, and the module :mod:`errors`. They are
loaded on first use, so that ``import hvdtrain`` and ``python -m hvdtrain --help`` load neither a framework
nor Horovod.
docs/python.md shows them in use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Block", "Callback", "Dataset", "EvalSets", "GatheredMetric", "MetricObject", "RunContext",
    "SumMetric", "Summary", "TrainOptions", "Weighted", "__version__", "all_gather", "as_dataset", "errors",
    "evaluate", "export", "import_weights", "launch", "load", "lr_find", "open_parquet",
    "pad", "predict", "stream", "train",
]  # fmt: skip

_HOMES = {
    "Block": "hvdtrain.models.block",
    "Callback": "hvdtrain.callbacks",
    "Dataset": "hvdtrain.task",
    "EvalSets": "hvdtrain.data.eval_sets",
    "GatheredMetric": "hvdtrain.backends.objective.stateful_metrics",
    "MetricObject": "hvdtrain.backends.objective.metric_objects",
    "RunContext": "hvdtrain.callbacks",
    "SumMetric": "hvdtrain.backends.objective.stateful_metrics",
    "Summary": "hvdtrain.callbacks",
    "TrainOptions": "hvdtrain.config.train_options",
    "Weighted": "hvdtrain.backends.objective.losses",
    "all_gather": "hvdtrain.backends.objective.gathering",
    "as_dataset": "hvdtrain.data.datasets",
    "evaluate": "hvdtrain.jobs.serving.inference",
    "export": "hvdtrain.jobs.serving.models",
    "import_weights": "hvdtrain.jobs.serving.models",
    "launch": "hvdtrain.jobs.launch",
    "load": "hvdtrain.jobs.serving.models",
    "lr_find": "hvdtrain.tools.search.lr_find",
    "open_parquet": "hvdtrain.data.parquet",
    "pad": "hvdtrain.data.collate",
    "predict": "hvdtrain.jobs.serving.inference",
    "stream": "hvdtrain.data.stream",
    "train": "hvdtrain.jobs.train",
}

if TYPE_CHECKING:
    from hvdtrain import errors
    from hvdtrain.backends.objective.gathering import all_gather
    from hvdtrain.backends.objective.losses import Weighted
    from hvdtrain.backends.objective.metric_objects import MetricObject
    from hvdtrain.backends.objective.stateful_metrics import GatheredMetric, SumMetric
    from hvdtrain.callbacks import Callback, RunContext, Summary
    from hvdtrain.config.train_options import TrainOptions
    from hvdtrain.data.collate import pad
    from hvdtrain.data.datasets import as_dataset
    from hvdtrain.data.eval_sets import EvalSets
    from hvdtrain.data.parquet import open_parquet
    from hvdtrain.data.stream import stream
    from hvdtrain.jobs.launch import launch
    from hvdtrain.jobs.serving.inference import evaluate, predict
    from hvdtrain.jobs.serving.models import export, import_weights, load
    from hvdtrain.jobs.train import train
    from hvdtrain.task import Dataset
    from hvdtrain.tools.search.lr_find import lr_find


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("hvdtrain.errors")
    if name == "open_webdataset":
        raise AttributeError("open_webdataset has left; hvdtrain.stream(paths, inputs, targets) reads tars")
    if name not in _HOMES:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
