"""Objects between real workers: they arrive as they were, and no pickle of a peer is executed."""

from pathlib import Path

import pytest
from support.pool import Key, call

CASES = Path(__file__).with_name("object_cases.py")


@pytest.mark.parametrize(("framework", "controller"), [("torch", "mpi"), ("tf", "gloo")])
def test_objects_travel_between_workers(framework, controller, tmp_path):
    call(Key(framework, controller, 2), f"{CASES}:exchanged", tmp_path, framework=framework)


@pytest.mark.parametrize(("framework", "controller"), [("torch", "mpi"), ("tf", "gloo")])
def test_a_pickle_of_another_worker_is_not_executed(framework, controller, tmp_path):
    done = call(Key(framework, controller, 2), f"{CASES}:pickles_sent", tmp_path, framework=framework)
    bare, framed = done.values[0]
    assert bare.startswith("what arrived from rank 1 is not what the workers exchange here")
    assert framed.startswith("rank 1 sent what no worker of this version sends: ")
    assert not (tmp_path / "executed").exists()
