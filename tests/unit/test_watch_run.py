"""Following a run: its log as it grows and is cut back, broken lines, how it stands, and the end."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.stored_runs import SUMMARY, change, evaluation, lines_of, make_run, window

from hvdtrain.errors import UsageError
from hvdtrain.reporting.compare import print_table
from hvdtrain.reporting.stored_runs import LOST_SECONDS, read_run
from hvdtrain.tools.report import watch as following
from hvdtrain.tools.report.page import write_report
from hvdtrain.tools.report.watch import (
    Ends,
    FollowedRun,
    Kind,
    LogFollower,
    Standing,
    View,
    follow,
    standing_of,
)

RUNNING = Standing(Kind.RUNNING, "running")


def steps(records):
    return [record["step"] for record in records]


def test_a_log_that_is_cut_back_is_read_anew_even_if_it_has_grown_since(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of(*(window(step) for step in (10, 20, 30))))
    log = LogFollower(path)
    log.poll()
    with path.open("r+") as file:  # in place
        file.truncate(len(lines_of(window(10))))
        file.seek(0, os.SEEK_END)
        file.write(lines_of(*(window(step, loss=0.5) for step in (20, 30, 40))))
    records, is_cut = log.poll()
    assert (steps(records), is_cut) == ([10, 20, 30, 40], True)
    other = tmp_path / "new"  # another file in its place
    other.write_text(lines_of(*(window(step) for step in (10, 20, 30, 40, 50, 60))))
    other.replace(path)
    assert log.poll()[1]
    path.unlink()
    assert log.poll() == ([], True)
    assert log.poll() == ([], False)


def test_a_cut_is_said_once_also_if_the_run_then_cannot_be_read(tmp_path, monkeypatch):
    def fail(_):
        raise OSError("stale file handle")

    run = make_run(tmp_path, window(10), window(20), summary=None)
    followed = FollowedRun(run)
    followed.poll()
    (run / "metrics.jsonl").write_text(lines_of(window(10)))
    followed.poll()
    assert followed.is_cut
    monkeypatch.setattr(following.stored, "read_run", fail)
    assert followed.poll().kind is Kind.UNCLEAR
    assert not followed.is_cut


HOLD = """
import sys
from pathlib import Path
from hvdtrain.jobs.run_directory.lock import RunLock
lock = RunLock()
lock.acquire(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold():
    """Locks run directories as a job does."""
    jobs = []

    def lock(folder: Path) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, str(folder)]
        jobs.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert jobs[-1].stdout.readline() == b"locked\n"
        return jobs[-1]

    yield lock
    for job in jobs:
        job.kill()
        job.communicate()


def silent(run, seconds):
    """Let the last record be some seconds old; return how the run stands."""
    then = time.time() - seconds
    os.utime(run / "metrics.jsonl", (then, then))
    return standing_of(read_run(run))


def test_a_run_whose_lock_is_held_trains_and_one_that_was_killed_is_lost(tmp_path, hold):
    run = make_run(tmp_path, window(10), summary=None)
    job = hold(run)
    before = (run / ".lock").read_bytes()
    standing = silent(run, 100)
    assert standing.kind is Kind.RUNNING
    assert f"process {job.pid} on " in standing.text
    job.kill()
    job.wait()
    assert silent(run, 1).kind is Kind.UNCLEAR, "between two worlds, nobody holds the lock for a moment"
    standing = silent(run, LOST_SECONDS)
    assert standing.kind is Kind.KILLED
    assert "no job holds the lock" in standing.text
    assert (run / ".lock").read_bytes() == before, "looking changes nothing"


def test_a_run_that_goes_on_has_not_ended_by_the_summary_before(tmp_path, hold):
    run = make_run(tmp_path, window(40))
    hold(run).communicate()
    assert silent(run, 60).kind is Kind.ENDED
    (run / "summary.json").write_text(json.dumps({**SUMMARY, "status": "[red]"}))
    assert silent(run, 60).text.startswith("unknown; ")
    hold(run)
    assert silent(run, 300).kind is Kind.RUNNING
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    assert silent(run, 300).kind is Kind.ENDED


def test_the_lock_of_another_host_may_not_be_seen(tmp_path):
    run = make_run(tmp_path, window(10), summary=None)
    holder = {"pid": 7, "host": "another-host", "since": "2030-01-01T00:00:00+00:00"}
    (run / ".lock").write_text(json.dumps(holder))
    standing = silent(run, 1000)
    assert (standing.kind, "cannot be seen" in standing.text) == (Kind.RUNNING, True)
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps(SUMMARY))
    assert silent(run, 2).kind is Kind.ENDED
    os.utime(summary, (1.0, 1.0))
    assert silent(run, 3).kind is Kind.RUNNING, "a later job has taken the lock"
    os.utime(summary)
    summary.write_text("{")
    assert silent(run, 3).text.startswith("unknown; cannot read summary.json")
    assert silent(run, 3).kind is Kind.ENDED


STOPPED, LOST, ENDED, UNCLEAR = (
    Standing(kind, "") for kind in (Kind.STOPPED, Kind.KILLED, Kind.ENDED, Kind.UNCLEAR)
)


@pytest.mark.parametrize(
    ("wait", "standings", "over"),
    [
        (None, [(RUNNING, 0), (ENDED, 1)], True),
        (None, [(STOPPED, 0)], True),
        (None, [(RUNNING, 0), (LOST, 1), (LOST, 61)], True),
        (None, [(LOST, 0)], False),
        (None, [(LOST, 0), (LOST, 10)], True),
        (None, [(RUNNING, 0), (UNCLEAR, 1), (LOST, 11), (LOST, 70)], False),
        (None, [(RUNNING, 0), (STOPPED, 1), (RUNNING, 50), (STOPPED, 55), (STOPPED, 80)], False),
        (100.0, [(STOPPED, 0), (STOPPED, 99)], False),
        (100.0, [(STOPPED, 0), (STOPPED, 100)], True),
    ],
)
def test_following_ends_with_the_run(wait, standings, over):
    ends = Ends(wait)
    assert [ends.is_over(standing, float(now)) for standing, now in standings][-1] == over


def test_what_is_no_run_is_refused(tmp_path):
    for wait in (None, 0.0):
        with pytest.raises(UsageError, match=r"no run \(none of summary"):
            follow(tmp_path / "missing", wait)


def test_plain_lines_tell_a_run_to_its_end_over_a_resume(tmp_path, capsys, monkeypatch, hold):
    monkeypatch.setattr(following, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(following, "_LINE_SECONDS", 0.0)
    run = make_run(tmp_path / "run", window(10), evaluation(10), summary=None)
    job = hold(run)
    followed = threading.Thread(target=follow, args=(run,))
    followed.start()
    log = run / "metrics.jsonl"
    shown = ""

    def wait_for(text):
        nonlocal shown
        until = time.monotonic() + 60
        while text not in shown and time.monotonic() < until:
            shown += capsys.readouterr().out
            time.sleep(0.01)
        assert text in shown

    wait_for("eval  step     10  loss 0.2000  accuracy 0.9000")
    with log.open("a") as file:
        file.write(lines_of(window(20), change(20)))
    wait_for("event step     20  1 worker from step 21 on; left: rank 1 on h2: killed (SIGKILL)")
    log.write_text(lines_of(window(10), evaluation(10)))  # it resumes
    wait_for("the log was cut back, as the run was resumed")
    with log.open("a") as file:
        file.write(lines_of(window(20), evaluation(20)))
    wait_for("eval  step     20  loss 0.1000")
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    job.communicate()
    wait_for("run: completed; 40 steps in 8.0 s")
    followed.join(60)
    assert not followed.is_alive()
    assert "20  epoch   2.00  loss 0.0500  lr 0.1  samples/s 160  data wait 10%  0:00:04 left" in shown


TORN = '{"phase": "train", "st'
ONE = "metrics.jsonl: 1 line without a record, left out; the first is line 2"
TWO = "metrics.jsonl: 2 lines without a record, left out; the first is line 2"


def make(folder: Path, *broken: str) -> Path:
    """Make a run whose log has these lines after the first one, and a last one that is being written."""
    run = make_run(folder, window(10))
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in broken)
        file.write(lines_of(window(20), evaluation(20)) + TORN)
    return run


def watched(run: Path) -> str:
    followed, output = FollowedRun(run), io.StringIO()
    view = View(run, Console(file=output, width=200))
    for _ in range(2):
        view.show(followed, followed.poll())
    return output.getvalue()


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ((), ""),
        ((TORN,), ONE),
        (('{"phase": "train"}',), ONE),
        (("\0" * 40, TORN + lines_of(window(15)).rstrip()), TWO),
        (("x" * 2_100_000,), ONE),
    ],
)
def test_they_are_said_by_all_commands(tmp_path, capsys, monkeypatch, broken, said):
    run = make(tmp_path / "run", *broken)
    monkeypatch.setenv("COLUMNS", "80")
    print_table([run])
    shown = {"compare": capsys.readouterr().out}
    write_report([run], tmp_path / "page.html", verified=False)
    shown["report"] = (tmp_path / "page.html").read_text().partition('<script type="application/json"')[0]
    shown["watch"] = watched(run)
    for command, text in shown.items():
        assert ("without a record" in text) == bool(said), command
        assert said in text, command
        assert text.count(said) == 1 or not said, command


def test_a_line_that_is_written_out_later_was_never_broken(tmp_path):
    run = make(tmp_path)
    followed = FollowedRun(run)
    followed.poll()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(lines_of(window(30)).removeprefix(TORN))
    followed.poll()
    assert (followed.problem, followed.window["step"]) == ("", 30)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{TORN}\n")
    followed.poll()
    assert followed.problem == "metrics.jsonl: 1 line without a record, left out; the first is line 5"
