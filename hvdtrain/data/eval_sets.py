"""Several evaluation data sets by name, and what the sets and their metrics are called."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.naming import is_frame, names_of
from hvdtrain.data.numeric import TARGETS
from hvdtrain.data.readers import Fetch, Fetched
from hvdtrain.early_stopping import RESERVED, SEPARATOR
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.storage.text import counted
from hvdtrain.workers.user_errors import SAMPLE_NOTE, RaisedInReader

# what messages call the data, and reader processes know them by
TRAINING_DATA, EVALUATION_DATA = "training data", "evaluation data"

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class EvalSets(Mapping[str, Any]):
    """Several evaluation data sets by name: what a task's ``eval_data()`` can return.

    The metrics of the first set have their plain names, such as "accuracy"; those of the others begin
    with the name of the set: "noisy/accuracy".

    Args:
        sets: name to data set, each in any form that ``eval_data()`` can return alone.
        named: more of them, as keyword arguments.

    Raises:
        DataError: If there is no set, or a name is not allowed or is given twice.
    """

    def __init__(self, sets: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        if twice := next((name for name in named if name in (sets or {})), None):
            raise DataError(f"EvalSets: the name {twice!r} is given twice", "Give each set its own name.")
        self._sets = {**(sets or {}), **named}
        if not self._sets:
            raise DataError("EvalSets holds no data set", "Return None if there are no evaluation data.")
        for name in self._sets:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise DataError(
                    f"EvalSets: {name!r} cannot be the name of a data set",
                    "Use letters, digits, '_', '.' and '-'.",
                )
            if name in RESERVED:
                raise DataError(
                    f"EvalSets: {name!r} is the name of a number that hvdtrain logs itself",
                    f"Choose another name, such as 'my_{name}'. Reserved: {', '.join(sorted(RESERVED))}.",
                )

    def __getitem__(self, name: str) -> Any:
        return self._sets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sets)

    def __len__(self) -> int:
        """Return the number of sets."""
        return len(self._sets)


def sets_of(eval_data: Any) -> dict[str, Any]:
    """Return evaluation data as sets by name."""
    if eval_data is None:
        return {}
    return dict(eval_data) if isinstance(eval_data, EvalSets) else {"": eval_data}


def first_set(eval_data: Any) -> Any:
    """Return the first set of evaluation data, or None if there are none."""
    return next(iter(sets_of(eval_data).values()), None)


def set_words(name: str) -> str:
    """Return what messages call a set of evaluation data; those without a name are "evaluation data"."""
    return f"evaluation set {name!r}" if name else EVALUATION_DATA


def by_words(train_data: Any, eval_data: Any) -> dict[str, Any]:
    """Return data sets by what messages call them, the training data first if there are any."""
    training = {} if train_data is None else {TRAINING_DATA: train_data}
    return training | {set_words(name): one for name, one in sets_of(eval_data).items()}


def metric_prefixes(eval_data: Any) -> dict[str, str]:
    """Return what the names of a set's metrics begin with, by the set's name: nothing for the first."""
    return {name: f"{name}{SEPARATOR}" if place else "" for place, name in enumerate(sets_of(eval_data))}


def check_not_bare_sets(source: Any, collates: bool) -> None:
    """Check that ``eval_data()`` did not return several data sets in a plain dict, list or tuple."""
    parts: list[Any] = []
    if isinstance(source, Mapping) and not isinstance(source, EvalSets):
        parts = [] if any(key in source for key in ("inputs", *TARGETS)) else list(source.values())
    elif isinstance(source, list | tuple) and not collates:
        parts = list(source[:2])  # of a list of samples, the first tell what it is
    has_names = isinstance(source, Mapping)
    if len(parts) >= (1 if has_names else 2) and all(_is_data_set(part, has_names) for part in parts):
        sets = counted(len(source), "data set")
        raise DataError(
            f"eval_data() gave a {type(source).__name__} of {sets}; several have names here",
            'Return hvdtrain.EvalSets({"validation": data, "noisy": other}).',
        )


def _is_data_set(part: Any, in_mapping: bool) -> bool:
    """Return whether an object can be a data set, and no array or sample."""
    if is_frame(part):
        return any(name in TARGETS for name in names_of(part))
    if in_mapping and isinstance(part, Mapping):
        return any(key in part for key in TARGETS)
    if hasattr(part, "column_names"):  # of Hugging Face, which has a shape too
        return True
    is_plain = isinstance(part, Sequence | Mapping) or hasattr(part, "shape") or hasattr(part, "__array__")
    return not is_plain and hasattr(part, "__len__") and hasattr(part, "__getitem__")


def name_the_set(error: Exception, words: str) -> None:
    """Add to an exception of data which set they are of."""
    if isinstance(error, HvdtrainError):
        error.problem = f"{words}: {error.problem}"
        error.args = (error.problem if not error.remedy else f"{error.problem}\n{error.remedy}",)
    elif isinstance(error, RaisedInReader):
        error.where = f"{error.where} (of the {words})"
    else:
        notes = getattr(error, "__notes__", [])
        notes[:] = [f"{note} of the {words}" if note.startswith(SAMPLE_NOTE) else note for note in notes]


def fetch_with_name(fetch: Fetch, words: str) -> Fetch:
    """Return a function that fetches samples and whose exceptions say of which set they are."""

    def fetch_named(indices: NDArray[np.int64], keys: NDArray[np.uint64] | None = None) -> Fetched:
        try:
            return fetch(indices, keys)
        except Exception as error:
            name_the_set(error, words)
            raise

    return fetch_named
