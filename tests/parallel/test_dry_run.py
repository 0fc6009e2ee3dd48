"""``--check`` in a real job; that jobs are refused before their first step is shown by the zoo's models."""

import pytest
from support.documents import ROOT
from support.pool import command, controller_of


@pytest.mark.parametrize("framework", ["torch"])
def test_a_check_of_two_workers_shows_what_training_would_compute(framework, tmp_path):
    task = f"{ROOT}/tests/conformance/models/thawing.py:Thaw"
    words = ["--framework", framework, "--task", task, "--run-dir", str(tmp_path / "run"), "--check"]
    result = command(2, controller_of(framework, 2), framework, *words, cwd=tmp_path)
    assert result.returncode == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert "2 workers; nothing was trained" in lines[0]
    assert lines[1] == "model       67 parameters, 27 of them trained, in 2 tensors"
    assert lines[2].startswith("training    inputs float32 (")
    assert lines[3].startswith("outputs float32 (")
    assert lines[4].startswith("loss ")
    assert not result.spoke
    assert list(tmp_path.iterdir()) == []
