"""What can become an array of numbers."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def is_numeric(value: Any) -> bool:
    """Return whether a value of a record becomes an array of numbers."""
    if isinstance(value, str | bytes | Mapping) or value is None:
        return False
    if isinstance(value, np.ndarray) and value.dtype == object:  # lists of unequal lengths
        return all(map(is_numeric, value))
    try:
        return np.asarray(value).dtype.kind in "biufc"
    except ValueError:
        return False
