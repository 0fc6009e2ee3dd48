"""The drill's judgement of a run, its task and its options."""

from dataclasses import replace

from hvdtrain.tools.drill.command import Drilled, run_case
from hvdtrain.tools.drill.task import History, differences

INDICES = {1: [0, 1], 2: [2, 3], 3: [0, 2]}
SUMMARY = {"status": "completed", "checkpoint": "step-3"}


def line(step: int, loss: float = 0.5, phase: str = "train") -> dict:
    return {"phase": phase, "step": step, "loss": loss}


WHOLE = History([line(1), line(2), line(3), line(3, phase="eval")], INDICES, SUMMARY)


def test_the_same_history_has_lost_nothing():
    event = {"phase": "event", "step": 2, "pause_seconds": 1.5}
    disturbed = replace(WHOLE, lines=[line(1), line(2), event, line(3, 0.50001), line(3, phase="eval")])
    assert differences(disturbed, WHOLE) == []


def test_a_job_that_does_not_end_or_ends_badly_has_lost_something(tmp_path):
    drilled = Drilled([], 2, "torch", tmp_path, 1.0)
    for code, said in ((None, "the job did not end in time"), (3, "the job ended with exit code 3")):

        def ends(_: Drilled, code: int | None = code) -> tuple[int | None, str]:
            return code, "its output"

        outcome = run_case("it ends", ends, drilled, WHOLE)
        assert outcome.lost[0] == said
        assert outcome.output == "its output"
