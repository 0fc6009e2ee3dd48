"""The workers of an elastic job in a file, for whoever watches the job from outside."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STATE_VARIABLE = "HVDTRAIN_ELASTIC_STATE"


class StateFile:
    """A file of JSON that is replaced as a whole whenever something changes.

    Args:
        path: the file; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written = ""

    @property
    def is_wanted(self) -> bool:
        """Whether there is a file."""
        return self._path is not None

    @classmethod
    def named_by(cls, environ: Mapping[str, str]) -> "StateFile":
        """Return the file that the environment names, if it names one."""
        name = environ.get(STATE_VARIABLE, "")
        return cls(Path(name) if name else None)

    def write(self, state: str, generation: int, members: Sequence[Mapping[str, Any]]) -> None:
        """Write what has changed. A file that cannot be written disturbs nobody."""
        if self._path is None:
            return
        text = json.dumps({"state": state, "generation": generation, "members": list(members)})
        if text == self._written:
            return
        self._written = text
        new = self._path.with_name(f".{self._path.name}.new")
        with contextlib.suppress(OSError):
            new.write_text(text + "\n", encoding="utf-8")
            os.replace(new, self._path)
