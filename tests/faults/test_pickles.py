"""A worker that sends pickles where objects are exchanged: nothing of them is executed, and the job ends."""

import pytest
from endings import end_of


@pytest.mark.parametrize(("framework", "controller"), [("torch", "gloo")])
def test_a_pickle_is_not_executed_and_ends_the_job_with_a_message(framework, controller, tmp_path):
    ending = end_of(2, controller, "SendsPickles", "--framework", framework, cwd=tmp_path)
    assert ending.returncode == 3
    assert "what arrived from rank 1 is not what the workers exchange here" in ending.output
    assert "another program joined the job" in ending.output
    assert "Traceback" not in ending.output
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "run").exists()
