"""What the launcher of an elastic job tells the user."""

import sys

from hvdtrain.printable import printable


def say(name: str, text: str) -> None:
    """Tell the user something, on standard error.

    Args:
        name: of the launcher, which comes first.
        text: one or several lines.
    """
    print(f"{name}: {printable(text)}".replace("\n", "\n  "), file=sys.stderr, flush=True)
