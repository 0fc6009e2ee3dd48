"""The drill's judgement of a run, its task and its options."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdtrain.cli import cli
from hvdtrain.errors import TaskError, UsageError
from hvdtrain.tools.drill.command import Case, Drilled, run_case
from hvdtrain.tools.drill.jobs import History, Launch, differences
from hvdtrain.tools.drill.task import Drill

INDICES = {1: [0, 1], 2: [2, 3], 3: [0, 2]}
SUMMARY = {"status": "completed", "checkpoint": "step-3"}


def line(step: int, loss: float = 0.5, phase: str = "train") -> dict:
    return {"phase": phase, "step": step, "loss": loss}


WHOLE = History([line(1), line(2), line(3), line(3, phase="eval")], INDICES, SUMMARY)


def test_the_same_history_has_lost_nothing():
    event = {"phase": "event", "step": 2, "pause_seconds": 1.5}
    disturbed = replace(WHOLE, lines=[line(1), line(2), event, line(3, 0.50001), line(3, phase="eval")])
    assert differences(disturbed, WHOLE) == []
    assert disturbed.pause_seconds() == 1.5
    assert (WHOLE.pause_seconds(), WHOLE.samples(), WHOLE.loss()) == (0.0, 6, 0.5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lines": [line(1), line(3), line(3, phase="eval")]}, "logged steps missing: 2"),
        ({"lines": [line(1), line(2), line(2), line(3), line(3, phase="eval")]}, "logged steps twice: 2"),
        ({"lines": [line(1), line(3), line(2), line(3, phase="eval")]}, "logged steps out of order: 3"),
        ({"lines": [*WHOLE.lines, line(4)]}, "logged steps too many: 4"),
        ({"lines": [line(1), line(2), line(3)]}, "evaluations missing: 3"),
        (
            {"lines": [line(1), line(2, 0.6), *WHOLE.lines[2:]]},
            "the loss of step 2 is 0.6, and 0.5 undisturbed",
        ),
        ({"indices": {**INDICES, 2: [2, 2]}}, "samples of steps that are others than undisturbed: 2"),
        ({"indices": {1: [0, 1], 2: [2, 3]}}, "samples of steps that are others than undisturbed: 3"),
        ({"summary": {"status": "completed"}}, "there is no checkpoint that verifies"),
        ({"summary": {"status": "failed", "error": "lost"}}, "it ended with status failed: lost"),
        ({"summary": {}}, "it ended with status unknown"),
    ],
)
def test_what_is_lost_is_said(changed, said):
    assert differences(replace(WHOLE, **changed), WHOLE) == [said]


def test_a_torn_line_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(1)) + "\n" + '{"phase": "tr')
    (tmp_path / "indices").mkdir()
    (tmp_path / "indices" / "rank-0000.jsonl").write_text('{"step": 1, "indices": [4, 2]}\n')
    (tmp_path / "indices" / "rank-0001.jsonl").write_text('{"step": 1, "indices": [3]}\n')
    history = History.of(tmp_path)
    assert (history.steps(), history.indices, history.summary) == ([1], {1: [2, 3, 4]}, {})


def test_a_job_that_does_not_end_or_ends_badly_has_lost_something(tmp_path):
    drilled = Drilled(Launch(2, ("-H", "localhost:2")), "torch", tmp_path, 1.0)
    for code, said in ((None, "the job did not end in time"), (3, "the job ended with exit code 3")):

        def ends(_: Drilled, code: int | None = code) -> tuple[int | None, str]:
            return code, "its output"

        outcome = run_case(Case("it ends", ends), drilled, WHOLE)
        assert outcome.lost[0] == said
        assert outcome.output == "its output"


def test_the_task_refuses_what_is_no_disturbance():
    with pytest.raises(TaskError, match="kill@1#60"):
        Drill(disturb="kill rank 1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-H", "a:2", "--hostfile", "hosts"], "both name hosts"),
        (["-H", "a:1"], "2 workers or more"),
        (["-H", "a:2", "--workers", "3"], "there are 2 slots"),
        (["--folder", "."], "it is not empty"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a slots=2\n")
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(cli, ["drill", *options], standalone_mode=False, catch_exceptions=False)
