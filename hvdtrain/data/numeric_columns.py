"""Which columns of records and of a stream's samples are used: those that hold numbers."""

from collections.abc import Hashable, Mapping
from typing import Any

from hvdtrain.data.naming import arrays_of, check_kept, left_out_notes, named
from hvdtrain.data.numeric import is_numeric
from hvdtrain.errors import DataError
from hvdtrain.task import Arrays


class NumericColumns:
    """Makes arrays of samples, without columns that hold no numbers.

    Until it has seen a sample, nothing is left out: the user's own function may make samples of anything.

    Args:
        names: what columns are called in batches, by what the source calls them.

    Attributes:
        notes: what to tell the user.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._left_out: frozenset[Hashable] = frozenset()
        self.notes: tuple[str, ...] = ()

    def learn(self, sample: Mapping[Any, Any], place: str) -> None:
        """Leave out from now on what holds no numbers in a sample.

        What begins with two underscores is left out without a note.

        Args:
            sample: the sample.
            place: where it lies, for messages.

        Raises:
            DataError: If a column that is named holds no numbers, or none does.
        """
        left_out = [name for name, value in sample.items() if not is_numeric(value)]
        texts = [str(name) for name in left_out]
        check_kept(texts, self._names)
        if len(left_out) == len(sample):
            raise DataError(
                f"no column of {place} holds numbers; it has {sorted(texts)}",
                "Give decode, a function that makes a sample of it.",
            )
        self._left_out = frozenset(left_out)
        self.notes = left_out_notes([text for text in texts if not text.startswith("__")])

    def arrays(self, item: Any) -> Arrays:
        """Return a sample, in any form that a data set may return, as arrays by name."""
        if self._left_out:
            item = {name: value for name, value in item.items() if name not in self._left_out}
        return arrays_of(named(item, self._names))
