"""Lines of metrics.jsonl that hold no record: each command says which, and how many."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from support.stored_runs import evaluation, lines_of, make_run, window

from hvdtrain.reporting.compare import print_table
from hvdtrain.tools.report.page import write_report
from hvdtrain.tools.report.watch import FollowedRun, View

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
