"""Whether somebody else can change what a build takes from its cache."""

import grp
import os
import pwd

import pytest

from hvdtrain.horovod_build.cache import exposure

OWN = os.geteuid()
OWN_GROUP, OTHER_GROUP, SHARED_GROUP = 2001, 2000, 2002


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """The user, whose own group has another number than the user, and two other groups."""
    found = {
        OWN_GROUP: grp.struct_group(("ann", "x", OWN_GROUP, ["ann"])),
        OTHER_GROUP: grp.struct_group(("team", "x", OTHER_GROUP, [])),
        SHARED_GROUP: grp.struct_group(("ann", "x", SHARED_GROUP, ["ann", "bob"])),
    }
    monkeypatch.setattr(grp, "getgrgid", found.__getitem__)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(("ann", "x", uid, 0, "", "/", "")))


@pytest.mark.parametrize(
    ("owner", "mode", "said"),
    [
        ((OWN, OWN), 0o755, ""),
        ((OWN, OWN_GROUP), 0o775, ""),  # a group of one user alone, as many systems give one to each
        ((OWN, OTHER_GROUP), 0o755, ""),
        ((OWN, OTHER_GROUP), 0o775, "can be written by group 2000"),
        ((OWN, SHARED_GROUP), 0o775, "can be written by group 2002"),
        ((OWN, 2003), 0o775, "can be written by group 2003"),  # one without a name
        ((OWN, OWN), 0o757, "can be written by everybody"),
        ((OWN, OWN), 0o1777, "can be written by everybody"),
        ((1003, OWN), 0o700, "belongs to user 1003"),
    ],
)
@pytest.mark.parametrize("below", ["", "wheels"])
def test_a_folder_is_ours_alone(tmp_path, owner, mode, said, below):
    if OWN and owner != (OWN, OWN):
        pytest.skip("root alone gives files away")
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chown(folder, *owner)
    folder.chmod(mode)
    if below and mode & 0o1000:
        said = ""  # nobody replaces what we made in a sticky folder
    assert exposure(folder / below) == (f"{folder} {said}" if said else "")


def test_a_link_is_looked_at_on_both_sides(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "open" / "cache")
    assert exposure(tmp_path / "link") == f"{tmp_path / 'open'} can be written by everybody"
