"""bench in real jobs: what it measures, launches and compares, and that nothing is left behind."""

import json
from pathlib import Path

import pytest
from support.jobs import launcher, run
from support.pool import run_suite

SHORT = ["--batch-size", "8", "--seconds", "0.2", "--json", "bench.json"]


def measured(result, folder) -> dict:
    assert result.returncode == 0, result.output[-6000:]
    assert [path.name for path in folder.iterdir()] == ["bench.json"], "bench leaves nothing else"
    return json.loads((folder / "bench.json").read_text())


@pytest.mark.parametrize(("framework", "controller"), [("torch", "mpi")])
def test_a_job_is_measured(framework, controller, tmp_path):
    bench = ["python", "-m", "hvdtrain", "bench", "--framework", framework, "--max-bytes", "16K", *SHORT]
    result = run([*launcher(2, controller), *bench], tmp_path)
    found = measured(result, tmp_path)
    assert (found["workers"], found["controller"].lower(), found["global_batch"]) == (2, controller, 16)
    assert 2.0 < found["first_loss"] < 2.6  # of ten classes, before training
    parts = found["part_seconds"]
    assert list(parts) == ["data", "compute", "slowest", "communication"]
    assert parts["compute"]["median"] > 0
    assert parts["slowest"]["low"] >= 0
    step = found["step_seconds"]
    assert 0 < step["low"] <= step["median"] <= step["high"]
    assert found["steps_timed"] >= 50
    assert [one["bytes"] for one in found["all_reduce"]] == [4096, 16384]
    assert all(one["horovod_seconds"]["median"] > 0 for one in found["all_reduce"])
    assert "samples/s" in result.stdout
    assert result.stdout.count("bench: digits") == 1, "rank 0 alone shows what was found"


@pytest.mark.parametrize(("framework", "controller"), [("torch", "mpi"), ("tf", "gloo")])
def test_steps_of_all_kinds_are_measured(framework, controller, tmp_path):
    suite = Path(__file__).with_name("suite_bench.py")
    run_suite(suite, 2, controller, framework, cwd=tmp_path, timeout=500)


def test_a_sweep_launches_its_jobs(tmp_path):
    sweep = ["--sweep", "1,2", "-H", "localhost:2", "--controller", "gloo", "--no-split"]
    command = ["python", "-m", "hvdtrain", "bench", "--framework", "torch", *sweep, *SHORT]
    found = measured(run(command, tmp_path), tmp_path)
    assert [row["workers"] for row in found["sweep"]] == [1, 2]
    assert [row["jobs"][0]["global_batch"] for row in found["sweep"]] == [8, 16]
    assert found["sweep"][0]["efficiency"]["median"] == pytest.approx(1.0)
    alone, together = (row["samples_per_second"]["median"] for row in found["sweep"])
    assert found["sweep"][1]["efficiency"]["median"] == pytest.approx(together / 2 / alone)
