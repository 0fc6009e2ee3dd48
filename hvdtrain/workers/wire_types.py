"""The classes whose objects workers send one another; see ``hvdtrain.workers.wire``."""

from typing import TypeVar

TYPES: dict[str, type] = {}

T = TypeVar("T", bound=type)


def travels(cls: T) -> T:
    """Let objects of a data class, or of a pydantic model, travel between workers. A class decorator."""
    if TYPES.setdefault(cls.__name__, cls) is not cls:
        raise ValueError(f"two classes that travel are called {cls.__name__}")
    return cls
