"""What is said when a signal ends a measurement."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvdtrain.errors import Interrupted
from hvdtrain.host.launches import output_rank


@contextmanager
def said_if_interrupted(say: Callable[[str], None]) -> Iterator[None]:
    """Return a context in which a measurement that a signal ends says that nothing is kept of it.

    Args:
        say: is called with the text, on rank 0 alone.
    """
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        if not output_rank():
            say("interrupted; nothing was written")
        raise
