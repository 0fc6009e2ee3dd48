"""``prove`` finds what comes out wrong without a word when a mend of hvdtrain is taken back."""

import json

import pytest
from support.documents import ROOT
from support.jobs import run
from support.taken_back import TAKEN_BACK


@pytest.mark.parametrize("mend", TAKEN_BACK)
def test_a_mend_that_is_taken_back_is_found(mend, tmp_path, monkeypatch):
    task, framework, row, place, cause = TAKEN_BACK[mend]
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}:{ROOT}")
    words = ("--task", f"{ROOT}/tests/support/taken_back.py:{task.__name__}", "--steps", "2")
    command = ["python", "-m", "hvdtrain", "prove", "--framework", framework, *words, "--json", "found.json"]
    result = run(command, tmp_path, 900, MEND_TAKEN_BACK=mend)
    assert result.returncode == 1, result.output[-5000:]
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    first = next(one for one in rows if one["ok"] is False)
    assert first["what"].startswith(row), result.output[-5000:]
    assert first["text"].startswith(place), result.output[-5000:]
    assert cause in first["cause"]
