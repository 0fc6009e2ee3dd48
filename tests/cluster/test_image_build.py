"""Tests wait for an image that is built in the background, and say why there is none."""

import threading
from pathlib import Path

import pytest
from image import awaited


def test_the_root_of_a_finished_build_is_given(tmp_path):
    def finish() -> None:
        (tmp_path / "result").write_text("/some/root")
        (tmp_path / "result").rename(tmp_path / "built")

    timer = threading.Timer(0.7, finish)
    timer.start()
    assert awaited(tmp_path, seconds=20) == Path("/some/root")
    timer.join()


def test_a_build_that_failed_says_why(tmp_path):
    (tmp_path / "failed").write_text("debootstrap ended with 1")
    with pytest.raises(AssertionError, match="debootstrap ended with 1"):
        awaited(tmp_path)


def test_a_build_that_says_nothing_is_not_waited_for_for_ever(tmp_path):
    with pytest.raises(AssertionError, match="was not built in"):
        awaited(tmp_path, seconds=0.1)
