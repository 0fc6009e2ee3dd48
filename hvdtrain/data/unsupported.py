"""What users give as data that cannot be indexed sample by sample, and what to give instead."""

from typing import Any

import numpy as np

from hvdtrain.errors import DataError
from hvdtrain.storage.text import counted

_STREAM = (
    "It is a stream: wrap it, hvdtrain.stream(data, length=...), or give arrays, or an object with __len__ "
    "and __getitem__ that returns one sample, which allow more (`hvdtrain docs streams`)"
)
# by package and class, which may be a base class: what to do
_REMEDIES = {
    "hvdtrain.EvalSets": "Only eval_data() returns EvalSets, as they are; a set in them is a data set.",
    "torch.DataLoader": "Give its data set (loader.dataset): hvdtrain batches, shuffles and shards it; a "
    "collate_fn is given as hvdtrain.as_dataset(data, collate=...). A sampler is lost with the loader: "
    "return the weights of a WeightedRandomSampler in the task's method sample_probabilities().",
    "torch.IterableDataset": f"{_STREAM}.",
    "datasets.DatasetDict": "It is a set of splits: return one of them, such as data['train']. eval_data() "
    "can return several: hvdtrain.EvalSets(validation=data['validation'], test=data['test']).",
    "datasets.IterableDatasetDict": "Load it without streaming=True and return one of its splits.",
    "datasets.IterableDataset": f"{_STREAM}, or load it without streaming=True.",
    "keras.PyDataset": "Its items are batches. Give its arrays, or an object whose __getitem__ returns one "
    "sample: hvdtrain batches, shuffles and shards it.",
    "tensorflow.DatasetV2": f"{_STREAM}. If it fits in memory: "
    "list(data.unbatch().as_numpy_iterator()), without unbatch() if it is not batched.",
    "polars.LazyFrame": "Call its .collect().",
    "pyarrow.Table": "Give datasets.Dataset(table), or table.to_pandas().",
}
# that give batches, each of which would be taken for a sample
_BATCHES = ("torch.DataLoader", "keras.PyDataset")


def type_name(value: Any) -> str:
    """Return the type of a value with its module, such as "torch.utils.data.dataloader.DataLoader"."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def has_class(value: Any, name: str) -> bool:
    """Return whether a value's class, or a base class, has this name, such as "pandas.DataFrame"."""
    return name in _names(value)


def check_supported(source: Any) -> None:
    """Check that an object is none of those that hold samples in a form that hvdtrain cannot use."""
    remedy = next((_REMEDIES[name] for name in _names(source) if name in _REMEDIES), "")
    if not remedy and hasattr(source, "__next__"):
        remedy = (
            "It can be passed over only once. Give a list, or a function that returns a new one: "
            "hvdtrain.stream(make_samples, length=...)."
        )
    if remedy:
        raise DataError(f"data must be samples that can be indexed; found {type_name(source)}", remedy)


def check_no_batches(source: Any) -> None:
    """Check that what is to be a stream gives samples, as far as its class tells."""
    if has_class(source, "tensorflow.DatasetV2") and _is_batched(source):
        raise DataError(
            "a stream's items are samples; those of this tf.data pipeline are batches",
            "Leave out batch(), or give pipeline.unbatch(): hvdtrain makes the batches (--batch-size).",
        )
    if name := next((name for name in _names(source) if name in _BATCHES), None):
        raise DataError(
            f"a stream's items are samples; those of {type_name(source)} are batches", _REMEDIES[name]
        )


def check_dense(name: str, value: Any) -> None:
    """Check that an array is no sparse matrix."""
    if hasattr(value, "toarray") and hasattr(value, "nnz"):
        raise DataError(
            f"{name!r} is a sparse {type_name(value)}; samples are dense arrays",
            "Convert it with .toarray(), or row by row in the __getitem__ of a data set.",
        )


def check_unmasked(name: str, value: Any) -> None:
    """Check that no value of an array is masked: frameworks do not know masks."""
    if isinstance(value, np.ma.MaskedArray) and (count := int(np.ma.getmaskarray(value).sum())):
        raise DataError(
            f"{name!r} is a masked array in which {counted(count, 'value')} {'is' if count == 1 else 'are'} "
            "masked, and a batch has no mask",
            "Fill them, .filled(value), and give the mask under a key of its own if the model needs it. "
            "Targets can be filled with the task's ignore_index.",
        )


def _is_batched(pipeline: Any) -> bool:
    """Return whether the last operation of a tf.data pipeline that makes or takes batches makes them."""
    while True:
        name = type(pipeline).__name__.lower()
        if "batch" in name:
            return "unbatch" not in name
        inputs = pipeline._inputs()
        if len(inputs) != 1 or any(part in name for part in ("flatmap", "interleave", "window")):
            return False
        pipeline = inputs[0]


def _names(value: Any) -> list[str]:
    return [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(value).__mro__]
