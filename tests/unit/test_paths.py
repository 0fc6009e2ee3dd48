"""Paths as users write them."""

import pytest

from hvdtrain.storage.files import expand_path, expand_task


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NOT_SET", raising=False)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~/runs", "/home/me/runs"),
        ("$DATA/x", "/data/x"),
        ("${DATA}x", "/datax"),
        ("./~b", "./~b"),
        ("cost$", "cost$"),
    ],
)
def test_home_and_variables_are_replaced(text, path):
    assert expand_path(text) == path
    assert expand_task("$DATA/mine.py:Outer.Task") == "/data/mine.py:Outer.Task"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("$NOT_SET/x", "the environment variable NOT_SET is not set"),
        ("${EMPTY}/x", "the environment variable EMPTY is not set"),
        ("~nobody-of-that-name/x", "no home directory ~nobody-of-that-name; write ./~nobody-of-that-name"),
        ("a\0b", "null character"),
        ("missing/" + "\u00e9" * 128, "there can be no such file"),
    ],
)
def test_what_cannot_be_replaced_is_named(text, said):
    with pytest.raises(ValueError, match=said):
        expand_path(text)


def test_a_loop_of_links_is_named(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "loop" / "run"):
        with pytest.raises(ValueError, match="symbolic links: there can be no such file"):
            expand_path(str(path))
    monkeypatch.chdir(tmp_path)
    assert expand_path("missing/loop") == "missing/loop", "another of that name"
