"""Run directories that this user may not read: whose they are, and what to do."""

import errno
import os
import pwd
from pathlib import Path

_REFUSED = (errno.EACCES, errno.EPERM)


def refused_file(folder: Path, names: tuple[str, ...]) -> PermissionError | None:
    """Return why a file of a folder cannot be read by this user; None if all that are there can be."""
    for name in names:
        path = folder / name
        if path.exists() and not os.access(path, os.R_OK):
            return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return None


def access_remedy(error: OSError, folder: Path, writes: bool = False) -> str:
    """Return what to do about an error of access to a run directory; nothing about other errors.

    Args:
        error: the error.
        folder: the run directory.
        writes: whether the command writes there, too.
    """
    if error.errno not in _REFUSED:
        return ""
    owner, right = _owner_of(Path(os.fsdecode(error.filename or folder)), folder), "rwX" if writes else "rX"
    command = f"chmod -R a+{right} {folder}"
    if owner and owner != _name_of(os.geteuid()):
        return f"It belongs to {owner}, who can give access: {command}. Or run this command as {owner}."
    return f"Give yourself access: {command.replace('a+', 'u+')}."


def _owner_of(*paths: Path) -> str:
    """Return who owns the first of these paths that can be looked at, or a folder around it."""
    for path in paths:
        for place in (path, *path.resolve().parents[:1]):
            try:
                return _name_of(place.stat().st_uid)
            except OSError:
                continue
    return ""


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
