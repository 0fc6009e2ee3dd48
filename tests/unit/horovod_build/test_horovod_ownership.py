"""Whether somebody else can change what a build takes from its cache."""

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.horovod_build import cache as ownership
from hvdtrain.horovod_build.cache import exposure

ME, OTHER = 1001, 1002
USERS = {ME: "ann", OTHER: "bob"}
GROUPS = {
    ME: ("ann", []),
    2000: ("lab", ["ann", "bob"]),
    2001: ("ann", ["ann", "bob"]),
    2002: ("solo", ["ann"]),
}


@pytest.fixture
def files(monkeypatch):
    """Owners, groups and modes by path, of a machine where we are Ann."""
    found = {"/": (0, 0, 0o755), "/tmp": (0, 0, 0o1777), "/home": (0, 0, 0o755), "/home/ann": (ME, ME, 0o750)}

    def status(path):
        if str(path) not in found:
            raise FileNotFoundError(path)
        return SimpleNamespace(**dict(zip(("st_uid", "st_gid", "st_mode"), found[str(path)], strict=True)))

    def group(number):
        name, members = GROUPS[number]
        return grp.struct_group((name, "x", number, members))

    monkeypatch.setattr(Path, "stat", status)
    monkeypatch.setattr(Path, "resolve", lambda path: path)
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    monkeypatch.setattr(
        pwd, "getpwuid", lambda number: pwd.struct_passwd((USERS[number], "x", number, number, "", "", ""))
    )
    monkeypatch.setattr(grp, "getgrgid", group)
    return found


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ((ME, ME, 0o755), ""),
        ((0, 0, 0o755), ""),
        ((0, 0, 0o775), ""),
        ((ME, ME, 0o775), ""),  # the group of Ann alone, as many systems give one to each user
        ((ME, 2000, 0o755), ""),
        ((ME, 2000, 0o775), "/home/ann/cache can be written by the group lab"),
        ((ME, 2001, 0o775), "/home/ann/cache can be written by the group ann"),
        ((ME, 2002, 0o775), "/home/ann/cache can be written by the group solo"),
        ((ME, 2003, 0o775), "/home/ann/cache can be written by the group 2003"),
        ((ME, ME, 0o757), "/home/ann/cache can be written by everybody"),
        ((ME, ME, 0o1777), "/home/ann/cache can be written by everybody"),
        ((OTHER, OTHER, 0o700), "/home/ann/cache belongs to user bob"),
        ((1003, OTHER, 0o700), "/home/ann/cache belongs to user 1003"),
    ],
)
@pytest.mark.parametrize("below", ["", "/wheels"])
def test_a_folder_is_ours_alone(files, status, said, below):
    files["/home/ann/cache"] = status
    if below and status[2] & 0o1000:
        said = ""  # nobody replaces what Ann made in a sticky folder
    assert exposure(Path(f"/home/ann/cache{below}")) == said


def test_a_link_is_looked_at_on_both_sides(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "open" / "cache")
    assert ownership.exposure(tmp_path / "link") == f"{tmp_path / 'open'} can be written by everybody"
