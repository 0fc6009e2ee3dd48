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
    (one,) = found["measurements"]
    measured = one["measured"]
    assert (measured["workers"], measured["hosts"], measured["controller"]) == (2, 1, "MPI")
    assert measured["samples"] == 8
    assert measured["raw"]["median"] > 0
    assert [way["name"] for way in measured["ways"]] == ["none", "fp16", "powersgd:4", "sync-every 10"]
    assert all(way["encoding"]["median"] > 0 for way in measured["ways"][1:3])
    assert measured["curve"]["points"][-1][0] == 2**20
    assert [(check["workers"], check["source"]) for check in one["checks"]] == [(2, 2)]
    assert (measured["accumulate"], one["data_samples"]) == (1, 1438)
    at_two = next(one for one in found["predictions"] if one["way"] == "none" and one["workers"] == 2)
    parts = at_two["part_seconds"]
    for name in ("data", "compute"):
        assert parts[name] == pytest.approx(measured[name]["median"]), f"{name} is what was measured"
    assert parts["encoding"] == 0
    assert parts["agreement"] > 0
    assert parts["transfer"] >= 0, "noise may hide the bytes of a small model"
    exchange = sum(parts[name] for name in ("encoding", "agreement", "transfer", "rest"))
    expected = parts["data"] + parts["compute"] + parts["slowest"] + max(0.0, exchange)
    assert at_two["step_seconds"]["median"] == pytest.approx(expected)
    assert {one["workers"] for one in found["predictions"]} == {2, 4, 8, 16}
    assert {one["link"] for one in found["predictions"]} == {"1gbit", "10gbit"}


def test_jobs_are_launched_without_a_launcher(tmp_path):
    options = ["-np", "2", "--controller", "gloo", "--compression", "powersgd:2", "--link", "200mbit"]
    command = ["python", "-m", "hvdtrain", "plan", "--framework", "tf", *options, *SHORT]
    found = planned(run(command, tmp_path, timeout=500), tmp_path)
    (one,) = found["measurements"]
    assert (one["own_way"], one["measured"]["controller"]) == ("powersgd:2", "Gloo")
    assert found["predictions"][0]["way"] == "powersgd:2", "the job's own way is the first"
    (advice,) = found["advice"]
    assert advice["workers"] == 16
