"""What workers do with their cores while they wait for others."""

import json
from pathlib import Path

import pytest
from support.jobs import launcher, run


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_worker_that_waits_leaves_its_core_to_others(controller, tmp_path):
    script = Path(__file__).with_name("job_waiting.py")
    result = run([*launcher(2, controller), "python", str(script)], tmp_path)
    assert result.returncode == 0, result.output
    assert max(json.loads((tmp_path / "found.json").read_text())) < 0.6
