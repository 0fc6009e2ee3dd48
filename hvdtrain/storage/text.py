"""Words for numbers of things."""

import difflib
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

_URLS: dict[str, str] = {}  # by the path of the copy


def name_place(path: Path, url: str) -> None:
    """Have texts name a local copy by the URL that it was fetched from."""
    _URLS[str(path)] = url


def url_of(path: Path) -> str:
    """Return the URL that a local copy was fetched from; empty if it is none."""
    return _URLS.get(str(path), "")


def with_urls(text: str) -> str:
    """Return a text with the URLs of local copies in place of their paths."""
    for path in sorted(_URLS, key=len, reverse=True):
        text = text.replace(path, _URLS[path])
    return text


_COLOURS = re.compile("\x1b\\[[0-9;]*m")  # libraries put them into messages
_UNSEEN = ("Cc", "Cf", "Cs")  # controls, what changes the direction of writing, and half characters


def printable(text: str, lines: bool = True) -> str:
    """Return text without what could control a terminal; "?" stands in its place."""
    text = with_urls(text)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    text = _COLOURS.sub("", text.replace("\r\n", "\n"))
    return "".join(c if c in kept or unicodedata.category(c) not in _UNSEEN else "?" for c in text)


def counted(number: float, noun: str) -> str:
    """Return a number of things as text: "1 worker", "1,797 samples", "0.5 epochs"."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{text} {noun}" if number == 1 else f"{text} {noun}s"


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return the question whether another name was meant, in whatever case; empty if none is close."""
    by_plain_name = {str(other).lower(): str(other) for other in known}
    close = difflib.get_close_matches(str(name).lower(), by_plain_name, n=1)
    return f"Did you mean {by_plain_name[close[0]]!r}?" if close else ""


def some(names: Iterable[object], most: int) -> str:
    """Return the first of some names, and how many there are more: "a, b and 3 more"."""
    listed = list(map(str, names))
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
