"""Opening what a task's method gave: one data set, or several sets of evaluation data."""

from typing import Any

from hvdtrain.config import Config
from hvdtrain.data.bad_samples import Fetch, LocalFetch
from hvdtrain.data.blocks import order_identity
from hvdtrain.data.datasets import as_dataset, signature
from hvdtrain.data.eval_sets import EvalSets, check_not_bare_sets, fetch_with_name, name_the_set, set_words
from hvdtrain.jobs.data_identity import DATA


def open_sets(source: Any, collate: Any, config: Config, method: str) -> tuple[Any, dict[str, Any]]:
    """Open data and check that they can be read. Local: no collective.

    Args:
        source: what the task's method gave.
        collate: the task's function that makes batches, or None.
        config: the job's config.
        method: a key of ``DATA``; only ``eval_data`` can give several sets.

    Returns:
        The data set, or EvalSets of data sets, and what of them must be equal on all workers.

    Raises:
        DataError: If they cannot be used.
    """
    if method == "eval_data":
        check_not_bare_sets(source, collates=collate is not None)
    if method != "eval_data" or not isinstance(source, EvalSets):
        return _open_set(source, collate, config, DATA[method])
    opened, values = {}, {"names of the evaluation sets": ", ".join(source)}
    for name, one in source.items():
        opened[name], found = _open_set(one, collate, config, set_words(name), is_named=True)
        values |= found
    return EvalSets(opened), values


def _open_set(
    source: Any, collate: Any, config: Config, what: str, is_named: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Open a data set; ``what`` it is called stands in errors of the data if the user has named it."""
    try:
        dataset = as_dataset(source, collate=collate)
    except Exception as error:
        if is_named:
            name_the_set(error, what)
        raise
    fetch: Fetch = LocalFetch(dataset, skip=config.on_bad_sample == "skip")
    if is_named:
        fetch = fetch_with_name(fetch, what)
    kinds = signature(dataset, what, lambda indices: fetch(indices, None)[0])
    values = {f"{key} of the {what}": kind for key, kind in kinds.items()}
    if order := order_identity(dataset):
        values[f"blocks of the {what}"] = order
    return dataset, {f"size of the {what}": len(dataset), **values}
