"""Applying the edit table to Horovod's unpacked source, and telling one table from another.

The table itself is in ``edit_table``. Every edit names the exact text that it replaces, so that
a source that differs in any way stops the build instead of being edited half.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from hvdtrain.errors import HorovodBuildError


@dataclass(frozen=True)
class Edit:
    """One replacement in one file of Horovod's source.

    Args:
        name: short name, the same as in docs/horovod.md.
        file: path inside the source tree.
        find: the exact text to replace.
        replacement: what stands there afterwards.
        why: what goes wrong without the edit.
        upstream: issue or pull request that is about the same thing, or "none found".
        times: how often ``find`` must occur; all occurrences are replaced.
    """

    name: str
    file: str
    find: str
    replacement: str
    why: str
    upstream: str
    times: int = 1


def edits_digest(edits: Sequence[Edit]) -> str:
    """Compute twelve hex digits that change when what the table does to the source changes."""
    what_is_done = [astuple(edit)[1:4] for edit in edits]
    return hashlib.sha256(repr(what_is_done).encode()).hexdigest()[:12]


def apply_edits(source: Path, edits: Sequence[Edit]) -> None:
    """Apply every edit of the table to the source tree, in order.

    Args:
        source: the unpacked source distribution.
        edits: the table.

    Raises:
        HorovodBuildError: a file is missing, or a text does not occur as often as it must.
    """
    for edit in edits:
        path = source / edit.file
        if not path.is_file():
            raise HorovodBuildError(
                f"Edit {edit.name!r}: Horovod's source has no file {edit.file}.",
                "This is not the source of Horovod that the edits were made for.",
            )
        text = path.read_text(encoding="utf-8")
        found = text.count(edit.find)
        if found != edit.times:
            raise HorovodBuildError(
                f"Edit {edit.name!r} does not fit {edit.file}: its text occurs {found} times "
                f"there, not {edit.times}.",
                "This is not the source of Horovod that the edits were made for.",
            )
        path.write_text(text.replace(edit.find, edit.replacement), encoding="utf-8")
