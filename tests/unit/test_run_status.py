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
from hvdtrain.reporting.lock_state import LockState
from hvdtrain.reporting.stored_runs import FAR_SECONDS, status_of
from hvdtrain.tools.report.followed_run import StandingWatch
from hvdtrain.tools.report.page import read_for_page

HELD, FREE, UNSEEN = LockState(True), LockState(False), LockState(None)
FAR = LockState(False, 7, "another-host")


@pytest.mark.parametrize(
    ("summary", "lock", "silent", "watched", "problem", "word"),
    [
        ({"status": "completed"}, FREE, 1.0, 0.0, "", "completed"),
        ({"status": "stopped"}, HELD, 1.0, 0.0, "", "stopped"),
        ({"status": "failed"}, UNSEEN, 1.0, 0.0, "", "failed"),
        ({"status": "[red]"}, FREE, 1.0, 0.0, "", "unknown"),
        ({}, FREE, 1.0, 0.0, "", "unknown"),
        (None, HELD, math.inf, 0.0, "", "running"),
        (None, FREE, 11.0, 0.0, "", "killed"),
        (None, FREE, math.inf, 0.0, "", "killed"),
        (None, FREE, 3.0, 0.0, "", "unknown"),
        (None, FREE, 3.0, 5.0, "", "running"),
        (None, FREE, 11.0, 60.0, "", "killed"),
        (None, FREE, 60.0, 0.0, "it is broken", "unknown"),
        (None, FAR, 60.0, 0.0, "", "unknown"),
        (None, FAR, 60.0, 100.0, "", "running"),
        (None, FAR, FAR_SECONDS, 1e6, "", "killed"),
        (None, UNSEEN, math.inf, 1e6, "", "unknown"),
        (None, UNSEEN, 60.0, 100.0, "", "running"),
    ],
)
def test_one_word_for_each_case(*, summary, lock, silent, watched, problem, word):
    assert status_of(summary, lock, silent, watched, problem) == word


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
        (None, "another-host", 700.0, "killed", "killed"),
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
    watch = StandingWatch(run)
    watch.look(0.0, age_seconds)
    assert watch.look(11.0, age_seconds + 11.0).text.startswith(word)
    monkeypatch.setattr(track, "Sender", FakeSender)
    monkeypatch.setattr(track, "check_installed", lambda names: None)
    said: list[str] = []
    track.track_runs([run], ["mlflow"], False, said.append)
    assert FakeSender.ended == sent
    assert any("has not ended" in text for text in said) == (sent is None)
