"""A task and its data: both are made here, with the checks of what a user may have got wrong."""

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.config import Config
from hvdtrain.config.field_names import TASK_ADVICE, advice_for
from hvdtrain.data.datasets import ArrayDataset, as_dataset, fetch, signature
from hvdtrain.data.eval_sets import by_words, fetch_with_name, name_the_set
from hvdtrain.data.fingerprint import columns_of
from hvdtrain.data.numeric import all_bits, merged_by_cast
from hvdtrain.data.order import order_identity, unordered
from hvdtrain.data.readers import Fetch, LocalFetch
from hvdtrain.data.stream import Stream
from hvdtrain.errors import DataError, TaskError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.jobs.opening.data_identity import METHODS
from hvdtrain.session import Session
from hvdtrain.storage.text import counted, did_you_mean, some
from hvdtrain.task import ATTRIBUTES, MEMBERS, Arrays, GivenTask
from hvdtrain.workers.user_errors import task_errors


def streams_of(train_data: Any, eval_data: Any) -> dict[str, Stream]:
    """Return the streams among a job's data, by their names in messages."""
    data = by_words(train_data, eval_data)
    return {words: one for words, one in data.items() if isinstance(one, Stream)}


def promises(session: Session, before: Manifest | None) -> str:
    """Return which promises hold for the training data if it is a stream; empty if it is none."""
    stream, config = session.data.training, session.config
    if not isinstance(stream, Stream):
        return ""
    workers, parts = session.backend.workers.size, list[str]()
    if before is not None and (stream.is_dealt(before.workers) or stream.is_dealt(workers)):
        batch, last = (
            int(c.get("global_batch_size") or n * (c.get("batch_size") or 0) * (c.get("accumulate") or 1))
            for c, n in ((config.model_dump(), workers), (before.config, before.workers))
        )
        if (workers, batch) != (before.workers, last):
            parts.append(
                f"warning: resumed on {counted(workers, 'worker')} with a global batch of {batch} after "
                f"{before.workers} with {last}: of the pass that was begun, some samples may come twice, "
                "some never"
            )
    if stream.is_dealt(workers):
        shards = counted(stream.source.shards, "shard")
        parts.append(f"{shards} are distributed to {workers} workers; the curve depends on their number")
    elif workers > 1:
        parts.append("every worker reads all of it, and keeps its part of each step")
    buffer = stream.shuffle_buffer
    parts.append(f"shuffled within {counted(buffer, 'sample')}" if buffer else "not shuffled")
    if stream.length is None:
        parts.append("no length declared: what is due by epochs is due at the end")
    return "; ".join(parts)


def known_size(dataset: Any) -> int | None:
    """Return the number of samples of a data set; of a stream what was declared or counted, or None."""
    if isinstance(dataset, Stream):
        return dataset.length or dataset.seen
    return len(dataset)


_VALUES = 1 << 21  # of an array that are compared
_READ = 64  # samples of other data


def open_set(
    source: Any, collate: Any, config: Config, what: str, is_named: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Open a data set, which must be readable, with what of it must be equal on all workers. Local."""
    try:
        dataset = as_dataset(source, collate=collate)
    except Exception as error:
        name_the_set(error, what if is_named else f"{METHODS[what]}()")
        raise
    fetch: Fetch = LocalFetch(dataset, skip=config.on_bad_sample == "skip")
    if is_named:
        fetch = fetch_with_name(fetch, what)
    kinds = signature(dataset, what, lambda indices: fetch(indices, None)[0])
    values = {f"{key} of the {what}": kind for key, kind in kinds.items()}
    if order := order_identity(dataset):
        values[f"blocks of the {what}"] = order
    return dataset, {f"size of the {what}": len(dataset), **values}


def find_merged(datasets: Mapping[str, Any]) -> DataError | None:
    """Return the error of data of 64 bits of which different values become equal in 32 bits."""
    # Local. Workers may find different errors, as each reads samples for a few seconds only. Arrays in which
    # there are none are converted then, once.
    for what, dataset in datasets.items():
        with all_bits():
            arrays = _wide_arrays(dataset)
        for name, array in arrays.items():
            if name == "weights" or not array.size or (found := merged_by_cast(array)) is None:
                continue
            column, one, other = found
            place = f"column {column} of {name!r}" if array[0].size > 1 else repr(name)
            merged = f"{one!r} becomes infinite" if np.isinf(other) else f"{one!r} and {other!r} become equal"
            return DataError(
                f"{place} of the {what} has numbers of 64 bits, and the model has 32: {merged}",
                "Subtract their mean or number them from 0 in the task; or give the model 64 bits, with "
                ".double() in PyTorch and dtype='float64' in Keras; or, if the difference does not matter, "
                "convert them to float32.",
            )
        if isinstance(kept := unordered(dataset), ArrayDataset):
            kept.narrow()
    return None


def align_columns(
    datasets: Mapping[str, Any], expected: Mapping[str, Sequence[str]], whose: str
) -> list[str]:
    """Put the columns of tables in the order in which the model is given them; return notes. Local."""
    notes = []
    for what, dataset in datasets.items():
        for name, own in columns_of(dataset).items():
            wanted = list(expected.get(name, own))
            if own == wanted:
                continue
            missing = [column for column in wanted if column not in own]
            extra = [column for column in own if column not in wanted]
            if missing or extra:
                lacks = f"not {some(map(repr, missing), 8)}" if missing else ""
                has = f"but {some(map(repr, extra), 8)}" if extra else ""
                problem = f"{name!r} of the {what} has other columns than that of {whose}"
                remedy = "Give both the same columns; their order does not matter."
                both = ", ".join(filter(None, [lacks, has]))
                raise DataError(f"{problem}: {both}", remedy, everywhere=True)
            dataset.reorder(name, wanted)
            notes.append(f"{what}: the columns of {name!r} are put in the order of {whose}, by their names")
    return notes


def _wide_arrays(dataset: Any) -> Arrays:
    """Return the floating-point numbers of 64 bits of a data set, or of its first samples."""
    dataset = unordered(dataset)
    if isinstance(dataset, ArrayDataset):
        found = {name: a[: max(2, _VALUES * len(a) // max(1, a.size))] for name, a in dataset.arrays.items()}
    else:
        try:
            found = fetch(dataset, np.zeros(1, np.int64))
            if any(map(_is_wide, found.values())) and isinstance(dataset, Stream):
                items = islice(dataset.items(0, 0, None, shuffles=False), _READ)
                found = dataset.batch_of([dataset.decoded(item) for item in items])
            elif any(map(_is_wide, found.values())):
                found = fetch(dataset, np.arange(min(_READ, len(dataset))))
        except Exception:
            return {}  # it is reported when training reads it
    return {name: array for name, array in found.items() if _is_wide(array)}


def _is_wide(array: Any) -> bool:
    return bool(array.dtype.kind == "f" and array.dtype.itemsize == 8)


_NEAR = 0.84  # of difflib: a letter, or two of a long name


def make_task(task_class: Callable[..., Any], spec: str, options: Mapping[str, Any], framework: str) -> Any:
    """Construct a task and check that it has the required attributes."""
    _check_options(task_class, spec, options)
    with task_errors(f"task {spec} cannot be constructed"):
        task = task_class(**options)
    row = FRAMEWORKS[framework]
    for name in ("train_data", "eval_data", row.model_method):
        if callable(getattr(task, name, None)):
            continue
        needed, remedy = "", "`hvdtrain docs tasks` lists what a task needs."
        if name == row.model_method:
            needed = f", which --framework {framework} needs"
            methods = [r.model_method for r in FRAMEWORKS.values()]
            if other := next((one for one in methods if callable(getattr(task, one, None))), None):
                remedy = f"It has {other}(): use the other --framework, or add {name}()."
        raise TaskError(f"task {spec} has no method {name}(){needed}", _hint_at(task, name) or remedy)
    if not any(hasattr(task, name) for name in ("loss", row.loss_method, row.step_method)):
        hint = _hint_at(task, "loss") or _hint_at(task, row.loss_method)
        raise TaskError(f"task {spec} has neither loss nor {framework}_loss(model, batch)", hint)
    return task


def _check_options(task_class: Callable[..., Any], spec: str, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(task_class)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        names = list(signature.parameters)
        unknown = next((name for name in options if name not in names), "")
        takes = f"It takes {', '.join(names) or 'none'}; --set task_options.NAME=VALUE sets one."
        if isinstance(task_class, GivenTask):
            takes = "It was passed as an instance: give the options to its constructor, or pass the class."
        remedy = did_you_mean(unknown, names) or takes
        raise TaskError(f"task {spec}: task_options: {error}", remedy) from None


def notes_on_members(task: Any) -> list[str]:
    """Return notes on members of a task that are misspelt, or that other trainers have."""
    found = unknown_members(task).items()
    return [f"the task has {name}, which hvdtrain does not know; {meant}" for name, meant in found]


def unknown_members(task: Any) -> dict[str, str]:
    """Return members of a task that hvdtrain does not use, but seems meant to, by name with what is meant."""
    # What a class of a library gives is not looked at, nor what the task has in addition to the right member.
    classes = []
    for kind in type(task).__mro__:
        path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        is_installed = kind.__module__.partition(".")[0] in (*sys.stdlib_module_names, "hvdtrain")
        if kind.__module__ == "__main__" or not (is_installed or "-packages" in path):
            classes.append(kind)
    codes = [getattr(value, "__code__", None) for kind in classes for value in vars(kind).values()]
    read = {name for code in codes if code is not None for name in code.co_names}  # for its own use
    found = {}
    for members in map(vars, classes):
        for name in members:
            if name in MEMBERS or name in read or name.startswith("_"):
                continue
            near = difflib.get_close_matches(name.lower(), MEMBERS, n=1, cutoff=_NEAR)
            is_method = callable(inspect.getattr_static(task, name, None))  # a property is not computed
            own_name = f"{name}()" if is_method else name
            if advice := advice_for(name, TASK_ADVICE):
                found[own_name] = advice
            elif near and members.get(near[0]) is None:
                found[own_name] = f"did you mean {near[0]}{'' if near[0] in ATTRIBUTES else '()'}?"
    return found


def _hint_at(task: Any, missing: str) -> str:
    """Return what a task may have in place of a member that it lacks, as a sentence; empty if nothing is."""
    for name, meant in unknown_members(task).items():
        if re.search(rf"\b{missing}\b", meant):
            return f"It has {name}: {meant}"
    return ""
