"""What users give as data that cannot be indexed sample by sample, and what to give instead."""

from typing import Any

from hvdtrain.errors import DataError

_STREAM = (
    "Streams are not supported: hvdtrain shuffles and shards by index. Give arrays, or an object with "
    "__len__ and __getitem__ that returns one sample"
)
# by package and class, which may be a base class: what to do
_REMEDIES = {
    "hvdtrain.EvalSets": "Only eval_data() returns EvalSets, as they are; a set in them is a data set.",
    "torch.DataLoader": "Give its data set (loader.dataset): hvdtrain batches, shuffles and shards it; a "
    "collate_fn is given as hvdtrain.as_dataset(data, collate=...).",
    "torch.IterableDataset": f"{_STREAM}.",
    "datasets.DatasetDict": "It is a set of splits: return one of them, such as data['train']. eval_data() "
    "can return several: hvdtrain.EvalSets(validation=data['validation'], test=data['test']).",
    "datasets.IterableDatasetDict": "Load it without streaming=True and return one of its splits.",
    "datasets.IterableDataset": f"{_STREAM}: load it without streaming=True.",
    "keras.PyDataset": "Its items are batches. Give its arrays, or an object whose __getitem__ returns one "
    "sample: hvdtrain batches, shuffles and shards it.",
    "tensorflow.DatasetV2": f"{_STREAM}. If it fits in memory: "
    "list(data.unbatch().as_numpy_iterator()), without unbatch() if it is not batched.",
    "polars.LazyFrame": "Call its .collect().",
    "pyarrow.Table": "Give datasets.Dataset(table), or table.to_pandas().",
}


def type_name(value: Any) -> str:
    """Return the type of a value with its module, such as "torch.utils.data.dataloader.DataLoader"."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def has_class(value: Any, name: str) -> bool:
    """Return whether a value's class, or a base class, has this name, such as "pandas.DataFrame".

    Neither the package nor the module has to be loaded.
    """
    return name in _names(value)


def check_supported(source: Any) -> None:
    """Check that an object is none of those that hold samples in a form that hvdtrain cannot use.

    Raises:
        DataError: naming its type, with what to give instead.
    """
    remedy = next((_REMEDIES[name] for name in _names(source) if name in _REMEDIES), "")
    if not remedy and hasattr(source, "__next__"):
        remedy = f"{_STREAM}."
    if remedy:
        raise DataError(f"data must be samples that can be indexed; found {type_name(source)}", remedy)


def check_dense(name: str, value: Any) -> None:
    """Check that an array is no sparse matrix.

    Raises:
        DataError: If it is one.
    """
    if hasattr(value, "toarray") and hasattr(value, "nnz"):
        raise DataError(
            f"{name!r} is a sparse {type_name(value)}; samples are dense arrays",
            "Convert it with .toarray(), or row by row in the __getitem__ of a data set.",
        )


def _names(value: Any) -> list[str]:
    return [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(value).__mro__]
