"""Cutting the end of a log: whatever stands there, what stays is whole and not later than the step."""

import json
import os
from pathlib import Path

import pytest

from hvdtrain.reporting.records import cut_tail


def line(step: int, phase: str = "train", **values: object) -> bytes:
    return json.dumps({"phase": phase, "step": step, **values}).encode() + b"\n"


def lines(*steps: int) -> bytes:
    return b"".join(map(line, steps))


def after_cut(path: Path, content: bytes, step: int, *redone: str) -> bytes:
    path.write_bytes(content)
    cut_tail(path, step, redone)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "step", "left"),
    [
        (lines(1, 2, 3), 3, lines(1, 2, 3)),
        (lines(1, 2, 3), 2, lines(1, 2)),
        (lines(1, 2, 3), 0, b""),
        (lines(1, 2) + b'{"phase": "tra', 3, lines(1, 2)),
        (lines(1, 2) + b'{"phase": "train", "step": 3}', 3, lines(1, 2)),
        (lines(1) + b"\xff\xfe\n" + lines(2, 3), 2, lines(1, 2)),
        (lines(1) + b"\x00" * 5000 + b"\n" + lines(2), 2, lines(1, 2)),
        (lines(1) + b"[1]\n\n7\nnull\n" + lines(2), 2, lines(1, 2)),
        (lines(1) + b"[" * 5000 + b"\n" + lines(2), 2, lines(1, 2)),
        (line(10) + line(11) + line(10, "callback") + line(12), 10, line(10) + line(10, "callback")),
        (b"", 1, b""),
        (b"\n", 1, b""),
        (b"x" * 200_000, 1, b""),
    ],
)
def test_what_is_later_or_not_whole_goes(tmp_path, content, step, left):
    assert after_cut(tmp_path / "log", content, step) == left


def test_an_evaluation_that_is_done_again_goes_with_what_callbacks_logged_of_it(tmp_path):
    of_step = line(9, "callback", a=1) + line(9)
    evaluation = line(9, "eval") + line(9, "callback", b=2)
    assert after_cut(tmp_path / "log", lines(8) + of_step + evaluation, 9, "eval") == lines(8) + of_step
    whole = lines(8) + of_step + evaluation
    assert after_cut(tmp_path / "log", whole, 9) == whole
    assert after_cut(tmp_path / "log", whole, 10, "eval") == whole


def test_a_cut_at_the_end_keeps_the_file_and_another_makes_a_new_one(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(lines(1, 2, 3))
    before = path.stat().st_ino
    cut_tail(path, 2)
    assert path.stat().st_ino == before
    path.write_bytes(lines(1, 5, 2))
    cut_tail(path, 2)
    assert path.read_bytes() == lines(1, 2)
    assert os.listdir(tmp_path) == ["log"]
