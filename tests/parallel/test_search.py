"""lr-find and batch-find in real jobs."""

import json
from pathlib import Path

import pytest
from support import pool
from support.documents import ROOT, named_files
from support.jobs import FRAMEWORKS, run, temporary_folder

CASES = Path(__file__).with_name("search_cases.py")
RATES = (
    *("--global-batch-size", "32", "--rising-steps", "60", "--lowest-rate", "1e-4", "--device", "cpu"),
    *("--set", "initial_parameters=portable", "--json", "rates.json"),
)


def rates_of(framework: str, controller: str, workers: int, folder: Path) -> dict:
    folder.mkdir()
    words = ["lr-find", "--framework", framework, *RATES]
    result = pool.command(workers, controller, framework, *words, cwd=folder)
    assert result.returncode == 0, result.output[-5000:]
    assert [path.name for path in folder.iterdir()] == ["rates.json"], "lr-find leaves nothing else"
    assert result.stdout.count("lr-find: ") == 1, "rank 0 alone shows what was found"
    return json.loads((folder / "rates.json").read_text())


def check_same(found: dict, other: dict) -> None:
    """Check that two searches found the same: up to the rate that is suggested, losses are the same."""
    assert found["suggestions"][0]["learning_rate"] == other["suggestions"][0]["learning_rate"]
    peak = found["suggestions"][0]["peak"]
    for one, two in zip(found["curve"], other["curve"], strict=False):
        assert one["rate"] == two["rate"]
        if one["rate"] < peak:
            assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)


def test_the_same_rate_is_found_by_any_workers_in_both_frameworks(tmp_path):
    alone = rates_of("torch", "none", 1, tmp_path / "1")
    assert 0.005 < alone["suggestions"][0]["learning_rate"] < 1
    check_same(alone, rates_of("torch", "mpi", 2, tmp_path / "2"))
    check_same(alone, rates_of("tf", "gloo", 2, tmp_path / "tf"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_from_python_a_model_that_the_task_keeps_has_its_weights_or_those_of_a_run_again(framework, tmp_path):
    key = pool.Key(framework, pool.controller_of(framework, 2), 2)
    one, other = pool.call(key, f"{CASES}:found_from_python", tmp_path, framework=framework).values
    assert one["found"] == other["found"]
    _, diverged, rates = one["found"]
    assert diverged is not None
    assert rates < 40
    assert one["kept"] == [True, True]
    assert other["kept"][1], "the other workers get the weights of rank 0, as for a training"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("framework", ["torch"])
def test_the_largest_micro_batch_is_found_and_the_curve_stays(framework, tmp_path):
    job = ["--framework", framework, "--task", f"{CASES}:Large", "--batch-size", "2", "--accumulate", "4"]
    job += ["--device", "cpu", "--learning-rate", "0.02"]
    command = ["python", "-m", "hvdtrain", "batch-find", *job, "--seconds", "0.2", "--json", "found.json"]
    result = run(command, tmp_path, timeout=500)
    assert result.returncode == 0, result.output[-5000:]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["largest"] == {"batch_size": 4, "accumulate": 2}
    tried = {one["micro_batch"]: one for one in found["tried"]}
    assert list(tried) == [1, 2, 4, 8]
    assert tried[8]["problem"].startswith("does not fit: memory did not suffice")
    assert all(tried[size]["host_bytes"] > 2**26 for size in (1, 2, 4))
    runs = [
        pool.train(1, "none", *job[:5], *words, *job[8:], "--steps", "20", "--log-every", "1",
                   cwd=temporary_folder(), framework=framework)
        for words in (["2", "--accumulate", "4"], ["4", "--accumulate", "2"])
    ]  # fmt: skip
    assert len(runs[0].losses) == 20
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-4)


def test_a_worker_that_takes_too_much_memory_does_not_fit(tmp_path):
    job = ["--framework", "torch", "--batch-size", "2", "--device", "cpu", "--memory", "64M"]
    result = run(["python", "-m", "hvdtrain", "batch-find", *job, "--json", "found.json"], tmp_path)
    assert result.returncode == 0, result.output[-5000:]
    assert "no micro-batch fits" in result.stdout
    assert "of 64 MiB" in result.stdout


def test_a_launcher_does_not_start_what_launches(tmp_path):
    result = run(["horovodrun", "--gloo", "-np", "2", "python", "-m", "hvdtrain", "batch-find"], tmp_path)
    assert result.returncode != 0
    assert "batch-find launches workers itself" in result.output


def test_the_documented_script_runs(tmp_path):
    (script,) = named_files(ROOT / "docs" / "search.md").items()
    (tmp_path / script[0]).write_text(script[1])
    result = run(["python", script[0]], tmp_path)
    assert result.returncode == 0, result.output[-5000:]
    suggestion, diverged, steps = result.stdout.split()
    assert 0 < float(suggestion) < float(diverged)
    assert 20 < int(steps) <= 60
