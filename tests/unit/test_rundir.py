"""The run directory: made by rank 0, known to all, never written over."""

import json
import re

import pytest
from support.fakes import on_every_rank, open_directory

from hvdtrain.config import Config
from hvdtrain.config.layers import read_file, resolve
from hvdtrain.errors import ConfigError, EnvironmentFault


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**fields: object) -> Config:
    return Config(**{"framework": "torch", "epochs": 1, **fields})


@pytest.mark.parametrize(
    ("run_dir", "kind", "said"),
    [
        ("run", ConfigError, r"run_dir: run already holds a run \(metrics.jsonl\)(.|\n)*--resume"),
        ("saved", ConfigError, r"run_dir: saved already holds a run \(checkpoints\)"),
        ("file/run", EnvironmentFault, "cannot make the run directory: .*file"),
        (None, EnvironmentFault, "cannot make the run directory: .*runs"),
    ],
)
def test_a_directory_that_holds_a_run_or_cannot_be_made_is_refused_on_every_rank(folder, run_dir, kind, said):
    for name in ("file", "runs", "run/metrics.jsonl", "saved/checkpoints"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("earlier")
    for error in on_every_rank(["here"] * 3, lambda own: open_directory(config(run_dir=run_dir), own)):
        assert isinstance(error, kind)
        assert error.everywhere
        assert re.match(said, str(error))
    assert [path.name for path in (folder / "run").iterdir()] == ["metrics.jsonl"]


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in steps)


@pytest.fixture
def earlier(folder):
    """A run directory as a run leaves it that was killed after step 4."""
    run = folder / "run"
    (run / "indices").mkdir(parents=True)
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "metrics.jsonl").write_text(lines(1, 2, 3, 4))
    for rank in range(2):
        (run / "indices" / f"rank-000{rank}.jsonl").write_text(lines(1, 2, 3, 4))
    (run / "summary.json").write_text("{}")
    (run / "config.yaml").write_text("seed: 9\n")
    (run / "notes.txt").write_text("mine")
    return run


def gone_on(size: int, step: int, **fields: object) -> None:
    """Open the earlier run on every rank, to go on from a step; closes the reports."""
    settings = config(run_dir="run", **fields)
    for report, _ in on_every_rank(["here"] * size, lambda own: open_directory(settings, own, step)):
        report.close()


def test_a_run_that_goes_on_has_logs_up_to_its_step_its_new_config_and_no_old_summary(earlier):
    gone_on(2, 2, seed=3)
    logs = [earlier / "metrics.jsonl", *(earlier / "indices").iterdir()]
    assert [log.read_text() for log in logs] == [lines(1, 2)] * 3
    assert resolve([read_file(earlier / "config.yaml")]).seed == 3
    assert not (earlier / "summary.json").exists()


def test_a_run_that_starts_anew_in_its_directory_moves_its_logs_away(earlier):
    gone_on(1, 0)
    assert (earlier / "metrics.jsonl.old").read_text() == lines(1, 2, 3, 4)
    assert (earlier / "metrics.jsonl").read_text() == ""
    assert (earlier / "indices" / "rank-0001.jsonl.old").read_text() == lines(1, 2, 3, 4)


def test_logs_that_cannot_be_cut_are_named_on_every_rank(earlier):
    (earlier / "metrics.jsonl").unlink()
    (earlier / "metrics.jsonl").mkdir()
    outcomes = on_every_rank(["here"] * 2, lambda workers: open_directory(config(run_dir="run"), workers, 2))
    assert [type(outcome) for outcome in outcomes] == [EnvironmentFault] * 2
    assert "metrics.jsonl" in str(outcomes[1])
    assert (earlier / "summary.json").read_text() == "{}"
    assert (earlier / "config.yaml").read_text() == "seed: 9\n"
