"""Words for numbers of things."""

from collections.abc import Iterable


def counted(number: float, noun: str) -> str:
    """Return a number of things as text: "1 worker", "1,797 samples", "0.5 epochs"."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{text} {noun}" if number == 1 else f"{text} {noun}s"


def some(names: Iterable[object], most: int) -> str:
    """Return the first of some names, and how many there are more: "a, b and 3 more"."""
    listed = list(map(str, names))
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
