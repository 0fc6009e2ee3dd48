"""Names of metrics, parameters and tags as MLflow takes them."""

import hashlib
import posixpath
import re

_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
_LONGEST = 250  # characters
_HASH_LETTERS = 8


class MlflowNames:
    """Gives each name one that MLflow takes: no two get the same, and a name gets the same each time."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}  # the original by what it became

    def of(self, name: str) -> str:
        """Return what a name is in MLflow."""
        path = posixpath.normpath("/" + _NOT_ALLOWED.sub("_", name)).lstrip("/") or "_"
        if len(path) > _LONGEST or self._given.setdefault(path, name) != name:
            end = "_" + hashlib.sha256(name.encode()).hexdigest()[:_HASH_LETTERS]
            path = path[: _LONGEST - len(end)].rstrip("/") + end
        return path
