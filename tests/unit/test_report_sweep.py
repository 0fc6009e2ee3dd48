"""The page of a sweep: its trials, the best value so far, what mattered; its folder stays as it is."""

import re
import sqlite3
from pathlib import Path

import pytest
from support.stored_runs import evaluation, make_run, window

from hvdtrain.run_views import sweep_trials
from hvdtrain.run_views.command import write_report
from hvdtrain.run_views.sweep_trials import sweeps_among
from hvdtrain.search.study import storage_of

optuna = pytest.importorskip("optuna")


def sweep_in(folder: Path, kind: str) -> Path:
    """Make a sweep of six trials: four ended, one was pruned, one goes on."""
    folder.mkdir()
    study = optuna.create_study(study_name="sweep", storage=storage_of(folder, kind), direction="maximize")
    study.set_user_attr("sweep", {"metric": "accuracy:max"})
    for number, value in enumerate((0.5, 0.9, 0.7, None, 0.95, None)):
        trial = study.ask()
        trial.suggest_float("learning_rate", 0.01, 1.0)
        trial.suggest_categorical("optimizer", ["sgd", "adamw"])
        trial.report(value or 0.1, 1)
        if number == 3:
            trial.set_user_attr("reason", "pruned by <b>the study</b>")
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        elif value is not None:
            study.tell(trial, value)
        make_run(folder / f"trial-{number:04d}", window(10), evaluation(10))
    (folder / "trial-0005" / "summary.json").unlink()
    return folder


def section(page: Path) -> str:
    text = page.read_text().partition("<h2>Sweep")[2].partition("</section>")[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text))


def test_a_page_of_a_sweep_has_its_trials_and_its_runs(tmp_path):
    sweep, page = sweep_in(tmp_path / "sweep", "sqlite"), tmp_path / "page.html"
    before = {path: path.stat().st_mtime_ns for path in [sweep, *sweep.iterdir()]}
    said = write_report([sweep], page, verify=False)
    text = section(page)
    assert "6 runs" in said
    assert "note" not in said
    assert "best until now: trial 4 (trial-0004), accuracy 0.95." in text
    assert "pruned by &lt;b&gt;the study" in text
    assert re.search(r"field importance (learning_rate|optimizer)", text)
    assert "trial-0004" in page.read_text().partition('id="curves"')[2]
    assert {path: path.stat().st_mtime_ns for path in [sweep, *sweep.iterdir()]} == before


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_each_trial_has_its_state_and_the_best_value_so_far(tmp_path, kind):
    (found,) = sweeps_among([sweep_in(tmp_path / "sweep", kind), tmp_path])
    assert [(row[1], row[3]) for row in found.trials.rows] == [
        ("completed", "0.5"), ("completed", "0.9"), ("completed", "0.9"), ("pruned", "0.9"),
        ("completed", "0.95"), ("unknown", "0.95"),
    ]  # fmt: skip
    assert found.trials.head[:4] == ["trial", "state", "accuracy", "best so far"]


def test_a_study_that_is_being_written_is_read_as_it_was(tmp_path):
    sweep = sweep_in(tmp_path / "sweep", "sqlite")
    writing = sqlite3.connect(sweep / "study.db", isolation_level=None)
    writing.execute("BEGIN IMMEDIATE")
    writing.execute("DELETE FROM trials")
    assert "trial 4" in sweeps_among([sweep])[0].best
    writing.execute("ROLLBACK")
    writing.close()


def test_what_keeps_a_study_from_being_read_is_said(tmp_path, monkeypatch):
    sweep = sweep_in(tmp_path / "sweep", "journal")
    with (sweep / "study.journal").open("a") as file:
        file.write('{"op_code": ')
    assert sweeps_among([sweep])[0].problem == "", "it is being written"
    (sweep / "study.journal").write_text("nonsense\n")
    said = write_report([sweep], tmp_path / "page.html", verify=False)
    assert "note: sweep: its study cannot be read" in said
    assert "its study cannot be read" in section(tmp_path / "page.html")
    monkeypatch.setattr(sweep_trials, "find_spec", lambda name: None)
    assert "pip install 'hvdtrain[search]'" in sweeps_among([sweep])[0].problem
