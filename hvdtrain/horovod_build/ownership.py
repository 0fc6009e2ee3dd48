"""Who besides this user can change what is in a folder."""

import grp
import os
import pwd
import stat
from pathlib import Path


def exposure(path: Path) -> str:
    """Return why somebody other than this user and root could change a file or folder; empty if nobody can.

    In a folder above that others can write they could replace the next one, unless its sticky bit is set.
    What does not exist yet is not looked at.
    """
    paths = [path.absolute(), path.resolve()]
    for place in dict.fromkeys(place for one in paths for place in (one, *one.parents)):
        try:
            status = place.stat()
        except FileNotFoundError:
            continue
        if status.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to {_user(status.st_uid)}"
        if place not in paths and status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & stat.S_IWOTH:
            return f"{place} can be written by everybody"
        if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
            return f"{place} can be written by the group {_group(status.st_gid)}"
    return ""


def _is_own_group(number: int) -> bool:
    """Return whether a group is root's, or this user's own, which many systems give to each."""
    if number == 0:
        return True
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
