"""Logs: whole records whatever the disk does, and cut back where a run goes on."""

import errno
import json
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import Interrupted
from hvdtrain.reporting import jsonl as logs
from hvdtrain.reporting.jsonl import AppendFile
from hvdtrain.reporting.records import cut_log


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


@pytest.mark.parametrize("written", [0, 3, 6])
def test_a_record_that_a_signal_interrupts_is_there_once(tmp_path, monkeypatch, written):
    file, write = AppendFile(tmp_path / "log"), os.write
    file.append(b"first\n")

    def interrupted(descriptor, content):
        write(descriptor, content[:written])
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(Interrupted):
        file.append(b"second\n"[:6])
    monkeypatch.undo()
    file.append(b"third\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"first\nsecondthird\n"


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in steps)


def cut(path, text: str, step: int) -> str | None:
    """Cut a log of that text; give what is left, None for no log."""
    path.write_text(text)
    cut_log(path, step)
    return path.read_text() if path.exists() else None


def test_a_run_that_starts_anew_moves_the_log_away_whole(tmp_path):
    path = tmp_path / "log"
    assert cut(path, lines(1, 2), 0) is None
    assert (tmp_path / "log.old").read_text() == lines(1, 2)
