"""plan in real jobs: what it measures under a launcher, what it launches, and that nothing is left behind."""

import json

import pytest
from support.jobs import launcher, run

SHORT = ["--batch-size", "8", "--seconds", "0.2", "--hosts", "8", "--json", "plan.json"]


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
    command = ["python", "-m", "hvdtrain", "plan", "--framework", "torch", "--link", "1gbit,10gbit", *SHORT]
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
    command = ["python", "-m", "hvdtrain", "plan", "--framework", "torch", *options, *SHORT]
    found = planned(run(command, tmp_path, timeout=500), tmp_path)
    (one,) = found["measurements"]
    assert one["controller"] == "Gloo"
    assert found["predictions"][0]["way"] == "powersgd:2"
    (advice,) = found["advice"]
    assert advice["workers"] == 16
