"""The drill on this machine: real jobs, really disturbed. tests/cluster drills TensorFlow on three hosts."""

import json

import pytest
from support.jobs import run


@pytest.mark.timeout(1200)
def test_a_drill_loses_nothing(tmp_path):
    command = ["python", "-m", "hvdtrain", "drill", "--framework", "torch", "--json", "drill.json"]
    result = run(command, tmp_path, timeout=1100)
    assert result.returncode == 0, result.output[-6000:]
    cases = {case["case"]: case for case in json.loads((tmp_path / "drill.json").read_text())["cases"]}
    for name in ("a worker is killed", "rank 0 is killed", "a worker is frozen", "a worker gets SIGTERM"):
        assert 0 < cases[name]["recovery_seconds"] < 100, name
    assert not (tmp_path / "drill").exists(), "nothing was lost, so nothing is kept"
    assert "no step and no sample was lost or done twice" in result.stdout
