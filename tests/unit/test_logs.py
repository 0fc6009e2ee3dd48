"""Logs: whole records whatever the disk does, and cut back where a run goes on."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import Interrupted
from hvdtrain.reporting import jsonl as logs
from hvdtrain.reporting.jsonl import AppendFile
from hvdtrain.reporting.records import cut_tail


@given(rooms=st.lists(st.integers(0, 12) | st.none(), max_size=8))
def test_whatever_the_disk_does_no_record_is_lost_torn_or_twice(tmp_path_factory, rooms):
    path, write = tmp_path_factory.mktemp("logs") / "log", os.write
    left = [0]

    def limited(descriptor, data):
        if left[0] is None:
            return write(descriptor, data)
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "full")
        count = write(descriptor, data[: left[0]])
        left[0] -= count
        return count

    records = [b"record %d\n" % number for number in range(len(rooms) + 1)]
    file = AppendFile(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs.os, "write", limited)
        for room, record in zip([*rooms, None], records, strict=True):
            left[0] = room
            file.append(record)
            seen = path.read_bytes().splitlines(keepends=True)
            assert seen == records[: len(seen)]
    file.close()
    assert path.read_bytes() == b"".join(records)


def test_a_record_that_a_signal_interrupts_is_there_once(tmp_path, monkeypatch):
    file, write = AppendFile(tmp_path / "log"), os.write
    file.append(b"first\n")

    def interrupted(descriptor, content):
        write(descriptor, content[:3])
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(Interrupted):
        file.append(b"second")
    monkeypatch.undo()
    file.append(b"third\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"first\nsecondthird\n"


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
        (lines(1, 2) + b'{"phase": "tra', 3, lines(1, 2)),
        (lines(1) + b"\x00" * 5000 + b"\n" + lines(2), 2, lines(1, 2)),
        (lines(1) + b"[1]\n\n7\nnull\n" + lines(2), 2, lines(1, 2)),
        (line(10) + line(11) + line(10, "callback") + line(12), 10, line(10) + line(10, "callback")),
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


def test_a_cut_in_the_middle_makes_a_new_file(tmp_path):
    assert after_cut(tmp_path / "log", lines(1, 5, 2), 2) == lines(1, 2)
    assert os.listdir(tmp_path) == ["log"]
