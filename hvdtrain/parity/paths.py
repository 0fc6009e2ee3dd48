"""The portable paths of layers, from those of the arrays that they hold."""

from collections.abc import Callable, Iterable


def layer_paths(
    walked: Iterable[tuple[str, int]], arrays: Iterable[tuple[str, str]], renaming: Callable[[str], str]
) -> dict[int, str]:
    """Return the portable path of each layer, by its identity.

    A layer is found under several own paths where it is shared; the one that its arrays go by is taken.

    Args:
        walked: own path and identity of each layer, from the model down.
        arrays: own and portable name of each array.
        renaming: the task's names.
    """
    known: dict[str, str] = {}
    for own, portable in arrays:
        own_parts, parts = own.split("/"), portable.split("/")
        # an array's role may have several parts: those that both names end with are the same
        while own_parts and parts and own_parts[-1] == parts[-1]:
            own_parts, parts = own_parts[:-1], parts[:-1]
            known.setdefault("/".join(own_parts), "/".join(parts))
    found: dict[int, str] = {}
    is_known: set[int] = set()
    for own, key in walked:
        if own in known and key not in is_known:
            found[key] = known[own]
            is_known.add(key)
        elif key not in found:
            found[key] = renaming(own) if own else ""
    return found
