"""Texts with labels: tables read into class numbers and tokens, and split."""

import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.texts.encoding import Encoder
from hvdtrain.data.texts.tables import Table
from hvdtrain.errors import BadSampleError, DataError

_MOST_CLASSES = 10_000  # more are no labels but names of texts


@dataclass(frozen=True)
class Labels:
    """The labels of all texts.

    Args:
        names: the classes, in the order of their names (of their numbers where all are numbers).
        numbers: each text's class.
        sizes: texts of each table.
    """

    names: list[str]
    numbers: NDArray[np.int64]
    sizes: list[int]


def read_tables(tables: Sequence[Table], encoder: Encoder) -> Labels:
    """Read tables row by row; the texts go to the encoder, one table after the other.

    The first table says which classes there are.

    Raises:
        DataError: where a table has no row that can be used, or the classes are too few or too many.
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
                    "Is it the right column? Name it: --set task_options.label=COLUMN.",
                )
        sizes.append(len(numbers) - before)
        if not sizes[-1]:
            left_out = f"; left out: {len(table.left_out)}" if table.left_out else ""
            raise DataError(f"{table.path} has no row that can be used{left_out}")
    if len(found) < 2:
        raise DataError(
            f"{tables[0].path}: all texts have the label {next(iter(found))[:60]!r}; "
            "there must be two labels or more"
        )
    names = in_order(found)
    place_of = {name: place for place, name in enumerate(names)}
    table_of_places = np.asarray([place_of[name] for name in found])
    return Labels(names, table_of_places[np.asarray(numbers)], sizes)


def in_order(names: Iterable[str]) -> list[str]:
    """Give class names in order: 2 before 10 where all are whole numbers."""
    listed = list(names)
    if all(re.fullmatch(r"-?[0-9]{1,18}", name) for name in listed):
        return sorted(listed, key=lambda name: (int(name), name))
    return sorted(listed)


def split(sizes: Sequence[int], share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give which texts train and which evaluate.

    Args:
        sizes: texts of each table; a second one is for evaluation alone.
        share: part of a single table that evaluates; at least one text where it is above 0.
        seed: seed of the choice.

    Raises:
        DataError: where nothing is left to train on.
    """
    if len(sizes) > 1:
        return np.arange(sizes[0]), np.arange(sizes[0], sizes[0] + sizes[1])
    kept = max(1, round(sizes[0] * share)) if share else 0
    if kept >= sizes[0]:
        raise DataError(f"with eval_fraction {share:g}, none of {sizes[0]} texts is left to train on")
    shuffled = np.random.RandomState(seed).permutation(sizes[0])
    return np.sort(shuffled[kept:]), np.sort(shuffled[:kept])
