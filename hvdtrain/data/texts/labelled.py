"""Texts with labels: reading tables into class numbers and tokens, and splitting them."""

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.texts.encoding import Encoder
from hvdtrain.data.texts.tables import Table
from hvdtrain.errors import BadSampleError, DataError

_MOST_CLASSES = 10_000  # with more, the column probably holds identifiers


@dataclass(frozen=True)
class Labels:
    """The labels of all texts.

    Args:
        names: the names of the classes in sorted order; by value if all of them are numbers.
        numbers: the class of each text.
        sizes: number of texts in each table.
    """

    names: list[str]
    numbers: NDArray[np.int64]
    sizes: list[int]


def read_tables(tables: Sequence[Table], encoder: Encoder) -> Labels:
    """Read tables row by row, one after the other, and add their texts to the encoder.

    The classes are those of the first table.

    Raises:
        DataError: If a table has no valid row, or there are too few or too many classes.
    """
    found: dict[str, int] = {}
    numbers = array("i")
    sizes: list[int] = []
    for table in tables:
        before = len(numbers)
        for place, text, label in table.rows():
            if sizes and label not in found:
                problem = f"{table.path}, {place}: no text in {tables[0].path} has the label {label[:60]!r}"
                table.leave_out(BadSampleError(problem))
                continue
            numbers.append(found.setdefault(label, len(found)))
            encoder.add(text)
            if len(found) > _MOST_CLASSES:
                raise DataError(
                    f"{table.path}: column {table.label!r} has more than {_MOST_CLASSES:,} different labels",
                    "If it is the wrong column, set the right one: --set task_options.label=COLUMN.",
                )
        sizes.append(len(numbers) - before)
        if not sizes[-1]:
            left_out = f"; left out: {len(table.left_out)}" if table.left_out else ""
            raise DataError(f"{table.path} has no valid row{left_out}")
    if len(found) < 2:
        raise DataError(
            f"{tables[0].path}: all texts have the label {next(iter(found))[:60]!r}; "
            "there must be at least two labels"
        )
    names = in_order(found)
    place_of = {name: place for place, name in enumerate(names)}
    table_of_places = np.asarray([place_of[name] for name in found])
    return Labels(names, table_of_places[np.asarray(numbers)], sizes)


def in_order(names: Iterable[str]) -> list[str]:
    """Return class names in order: by value if all are integers, otherwise by name."""
    listed = list(names)
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in listed):
        return sorted(listed, key=lambda name: (int(name), name))
    return sorted(listed)


def split(sizes: Sequence[int], share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the texts for training and for evaluation.

    Args:
        sizes: number of texts in each table; a second table is for evaluation only.
        share: fraction of a single table that is for evaluation; at least one text if it is above 0.
        seed: seed of the split.

    Raises:
        DataError: If no text is left for training.
    """
    if len(sizes) > 1:
        return np.arange(sizes[0]), np.arange(sizes[0], sizes[0] + sizes[1])
    kept = max(1, round(sizes[0] * share)) if share else 0
    if kept >= sizes[0]:
        raise DataError(f"eval_fraction {share:g} leaves none of {sizes[0]} texts for training")
    shuffled = np.random.RandomState(seed).permutation(sizes[0])
    return np.sort(shuffled[kept:]), np.sort(shuffled[:kept])
