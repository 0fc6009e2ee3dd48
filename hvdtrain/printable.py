"""Text that comes from somebody else, such as the name of a task in a checkpoint, on a terminal."""

import re
import unicodedata

from hvdtrain.place_names import with_urls

_COLOURS = re.compile("\x1b\\[[0-9;]*m")  # libraries put them into messages
_UNSEEN = ("Cc", "Cf", "Cs")  # controls, what changes the direction of writing, and half characters


def printable(text: str, lines: bool = True) -> str:
    """Return text without what could control a terminal; "?" stands in its place.

    Args:
        text: the text.
        lines: whether it can have several lines.
    """
    text = with_urls(text)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    text = _COLOURS.sub("", text.replace("\r\n", "\n"))
    return "".join(c if c in kept or unicodedata.category(c) not in _UNSEEN else "?" for c in text)
