"""bench and plan in real jobs: what they measure, launch and predict, and that nothing is left behind."""

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


HOSTS = [*SHORT[:4], "--hosts", "8", "--json", "plan.json"]


def planned(result, folder) -> dict:
    assert result.returncode == 0, result.output[-6000:]
    assert [path.name for path in folder.iterdir()] == ["plan.json"], "plan leaves nothing else"
    assert result.stdout.count("plan: digits with") == 1, "rank 0 alone shows what was found"
    found = json.loads((folder / "plan.json").read_text())
    for one in found["predictions"]:
        for name in ("step_seconds", "samples_per_second", "efficiency"):
            assert 0 < one[name]["low"] <= one[name]["median"] <= one[name]["high"]
        assert one["efficiency"]["high"] <= 1
    return found


def test_a_launched_job_is_measured_and_predicted(tmp_path):
    command = ["python", "-m", "hvdtrain", "plan", "--framework", "torch", "--link", "1gbit,10gbit", *HOSTS]
    found = planned(run([*launcher(2, "mpi"), *command], tmp_path, timeout=500), tmp_path)
    (measured,) = found["measurements"]
    assert (measured["workers"], measured["hosts"], measured["controller"]) == (2, 1, "MPI")
    assert measured["global_batch"] == 16
    assert measured["exchange"]["name"] == "none"
    assert [one["bytes"] for one in measured["all_reduce"]][::4] == [4096, 2**20]
    at_two = next(one for one in found["predictions"] if one["workers"] == 2)
    parts = at_two["part_seconds"]
    for name in ("data", "compute", "slowest"):
        assert parts[name] == pytest.approx(measured["part_seconds"][name]["median"]), (
            f"{name} is what was measured"
        )
    assert parts["latency"] > 0
    assert parts["transfer"] >= 0, "noise may hide the bytes of a small model"
    exchange = sum(parts[name] for name in ("latency", "transfer", "rest"))
    expected = parts["data"] + parts["compute"] + parts["slowest"] + max(0.0, exchange)
    assert at_two["step_seconds"]["median"] == pytest.approx(expected)
    assert {one["workers"] for one in found["predictions"]} == {2, 4, 8, 16}
    assert {one["link"] for one in found["predictions"]} == {"1gbit", "10gbit"}


def test_jobs_are_launched_without_a_launcher(tmp_path):
    options = ["-np", "2", "--controller", "gloo", "--compression", "powersgd:2", "--link", "200mbit"]
    command = ["python", "-m", "hvdtrain", "plan", "--framework", "torch", *options, *HOSTS]
    found = planned(run(command, tmp_path, timeout=500), tmp_path)
    (one,) = found["measurements"]
    assert one["controller"] == "Gloo"
    assert found["predictions"][0]["way"] == "powersgd:2"
    (advice,) = found["advice"]
    assert advice["workers"] == 16
