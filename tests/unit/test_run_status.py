"""How a run ended or stands: one word for it, whoever says it."""

import json
import math
import os
import socket
import time
from pathlib import Path

import pytest
from support.stored_runs import SUMMARY, make_run, window

from hvdtrain.jobs import track
from hvdtrain.reporting.compare import print_csv
from hvdtrain.reporting.lock_state import Holder
from hvdtrain.reporting.stored_runs import read_run, status_of
from hvdtrain.tools.report.page import read_for_page
from hvdtrain.tools.report.watch import standing_of

HELD, FREE, UNSEEN = Holder(is_held=True), Holder(is_held=False), Holder()
FAR = Holder(7, "another-host", is_held=False)


@pytest.mark.parametrize(
    ("summary", "lock", "silent", "word"),
    [
        ({"status": "completed"}, FREE, 1.0, "completed"),
        ({"status": "stopped"}, HELD, 1.0, "stopped"),
        ({"status": "failed"}, UNSEEN, 1.0, "failed"),
        ({"status": "[red]"}, FREE, 1.0, "unknown"),
        ({}, FREE, 1.0, "unknown"),
        (None, HELD, math.inf, "running"),
        (None, FREE, 11.0, "killed"),
        (None, FREE, math.inf, "killed"),
        (None, FREE, 3.0, "unknown"),
        (None, FAR, 1e6, "unknown"),
        (None, UNSEEN, math.inf, "unknown"),
    ],
)
def test_one_word_for_each_case(summary, lock, silent, word):
    assert status_of(summary, lock, silent) == word


class FakeSender:
    """Keeps how it is told that a run ended."""

    ended: str | None = None
    place = "here"

    def __init__(self, *arguments: object) -> None:
        FakeSender.ended = None

    def send(self) -> None:
        pass

    def end(self, status: str, error: str) -> None:
        FakeSender.ended = status


def leave_lock(run: Path, host: str) -> None:
    (run / ".lock").write_text(json.dumps({"pid": 7, "host": host, "since": "2030-01-01T00:00:00+00:00"}))
    os.utime(run / ".lock", (1.0, 1.0))


@pytest.mark.parametrize(
    ("status", "host", "age_seconds", "word", "sent"),
    [
        ("failed", "", 60.0, "failed", "failed"),
        ("stopped", "here", 60.0, "stopped", "stopped"),
        ("odd", "here", 60.0, "unknown", "unknown"),
        (None, "here", 60.0, "killed", "killed"),
        (None, "another-host", 60.0, "unknown", None),
        (None, "another-host", 700.0, "unknown", "unknown"),
        (None, "", 700.0, "unknown", "unknown"),
    ],
)
def test_all_commands_say_the_same_word(
    *, tmp_path, monkeypatch, capsys, status, host, age_seconds, word, sent
):
    summary = None if status is None else {**SUMMARY, "status": status}
    run = make_run(tmp_path / "run", window(10), summary=summary)
    if host:
        leave_lock(run, socket.gethostname() if host == "here" else host)
    then = time.time() - age_seconds
    os.utime(run / "metrics.jsonl", (then, then))
    print_csv([run])
    assert f",{word}," in capsys.readouterr().out
    assert [found.stored.status for found in read_for_page([run], verified=False)] == [word]
    cannot_be_seen = word == "unknown" and summary is None
    assert standing_of(read_run(run)).text.startswith("running" if cannot_be_seen else word)
    monkeypatch.setattr(track, "Sender", FakeSender)
    monkeypatch.setattr(track, "check_installed", lambda names: None)
    said: list[str] = []
    track.track_runs([run], ["mlflow"], False, said.append)
    assert FakeSender.ended == sent
    assert any("has not ended" in text for text in said) == (sent is None)
