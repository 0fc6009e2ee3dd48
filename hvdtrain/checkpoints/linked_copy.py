"""A checkpoint that stays while it is sent, whatever retention deletes meanwhile."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def remove_copies(beside: Path, owner: str) -> None:
    """Remove the copies of a sender that was killed."""
    for folder in beside.glob(f"{_prefix(owner)}*"):
        if not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def copied(checkpoint: Path, beside: Path, owner: str) -> Iterator[Path | None]:
    """Return a context with another folder of a checkpoint's files, which are linked, not copied.

    Args:
        checkpoint: the checkpoint.
        beside: a folder of the same file system.
        owner: the tracker whose sender makes the copy; one at a time does.

    Returns:
        The folder; None if the checkpoint was deleted meanwhile.
    """
    remove_copies(beside, owner)
    with tempfile.TemporaryDirectory(prefix=_prefix(owner), dir=beside, ignore_cleanup_errors=True) as name:
        folder = Path(name) / checkpoint.name
        folder.mkdir()
        try:
            for path in checkpoint.iterdir():
                _link(path, folder / path.name)
        except FileNotFoundError:
            yield None
        else:
            yield folder


def _prefix(owner: str) -> str:
    return f"sending-{owner}-"


def _link(path: Path, new: Path) -> None:
    try:
        os.link(path, new, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(path, new, follow_symlinks=False)
