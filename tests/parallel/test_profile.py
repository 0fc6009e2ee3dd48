"""Profiles of whole jobs: a trace of all workers with Horovod's timeline on one clock, and who was late."""

import gzip
import json
import statistics
from pathlib import Path

import pytest
import straggler_tasks
from support.jobs import launcher, run, train
from support.profiles import check_trace

OPTIONS = ("--batch-size", "4", "--steps", "8", "--eval-every", "null", "--profile", "4-6")
_MS = 1000.0  # a trace counts microseconds


def read(run_dir: Path) -> tuple[dict, dict]:
    trace = json.loads(gzip.decompress((run_dir / "profile" / "trace.json.gz").read_bytes()))
    return trace, json.loads((run_dir / "profile" / "costs.json").read_text())


def spans(trace: dict, process: int, name: str) -> list[tuple[float, float]]:
    """Return when the spans of a name begin and end, in order."""
    found = [
        e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["name"]) == (process + 1, name)
    ]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in found)


@pytest.mark.parametrize(("framework", "controller"), [("torch", "gloo")])
def test_one_trace_of_all_workers_names_the_slow_one(framework, controller, tmp_path):
    task = f"{straggler_tasks.__file__}:SlowLoss"
    job = train(2, controller, "--framework", framework, "--task", task, *OPTIONS, cwd=tmp_path)
    trace, costs = read(job.folder)
    check_trace(trace, 2)
    assert "note: profile" not in job.result.output, job.result.output
    assert job.result.output.count("profile of steps 4 to 6 with 2 workers") == 1
    assert costs["problems"] == []
    assert costs["steps"] == [4, 5, 6]
    assert costs["ready_last"] == {"1": 3}
    waiting = {cost["what"]: cost["ms_per_step"] for cost in costs["costs"] if cost["kind"] == "wait"}
    late = waiting["waiting for rank 1, which had its gradients last in 3 of 3 steps"]
    assert late > 0.2e3 * straggler_tasks.SLOW_SECONDS  # of the mean of both workers, half is waiting at most
    assert sum(cost["share"] for cost in costs["costs"]) == pytest.approx(1, abs=1e-3)
    for rank in (0, 1):
        assert len(spans(trace, rank, "in training step")) == 3
        assert any(e["pid"] == rank + 1 and e.get("cat") == "operation" for e in trace["traceEvents"])
    # rank 0 cannot begin to reduce before rank 1 is ready, nor rank 1 have the sums before rank 0 begins
    begins = [begin for begin, _ in spans(trace, 2, "ALLREDUCE")]
    too_early, too_late = [], []
    for (_, ready), (_, own_end), (_, end) in zip(
        spans(trace, 1, "own part of the step"), *(spans(trace, rank, "all-reduce") for rank in (0, 1)),
        strict=True,
    ):  # fmt: skip
        last = max(begin for begin in begins if begin < own_end)
        too_early.append(ready - last)
        too_late.append(last - end)
    assert statistics.median(too_early) < _MS, too_early
    assert statistics.median(too_late) < _MS, too_late


def test_a_job_that_fails_in_the_window_leaves_what_was_recorded(tmp_path):
    words = ["--framework", "torch", "--task", f"{straggler_tasks.__file__}:Breaks", *OPTIONS]
    command = [*launcher(2, "mpi"), "python", "-m", "hvdtrain", *words, "--run-dir", "run"]
    result = run(command, tmp_path)
    assert result.returncode == 4, result.output
    assert "broken on purpose" in result.output
    assert "terminate called" not in result.output  # of a crash of Horovod
    trace, costs = read(tmp_path / "run")
    check_trace(trace, 1)
    assert (costs["steps"][:2], costs["workers"]) == ([4, 5], 1)


def test_a_timeline_takes_no_core_and_outlives_the_end_of_horovod(tmp_path):
    script = Path(__file__).with_name("job_timeline.py")
    fields = {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    result = run(["python", str(script)], tmp_path, **fields)
    assert result.returncode == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert max(found["shares"]) < 0.3  # Horovod's own thread wakes up a thousand times a second
    assert min(found["events"]) > 50
    assert found["ends"] == [50, 50, 50]  # the last ones, too, although Horovod ends at once


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_worker_that_waits_leaves_its_core_to_others_and_rank_0_chooses_the_timeline(controller, tmp_path):
    script = Path(__file__).with_name("job_waiting.py")
    result = run([*launcher(2, controller), "python", str(script)], tmp_path)
    assert result.returncode == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert max(found["shares"]) < 0.6
    assert found["sums"] == [3.0] * 4
