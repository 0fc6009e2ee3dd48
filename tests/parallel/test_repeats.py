"""The same job, run again with the same workers, leaves the same bits."""

import pytest
from support.jobs import temporary_folder
from support.pool import train
from support.resuming import checkpoint_files

OPTIONS = ("--steps", "20", "--log-every", "1", "--batch-size", "8", "--set", "eval_every=null")


@pytest.mark.parametrize(("framework", "controller"), [("torch", "mpi")])
def test_three_workers_leave_the_same_bits_again(framework, controller):
    """Of two numbers every order gives the same sum; of three, it must not depend on timing."""
    first, again = (
        train(3, controller, "--framework", framework, *OPTIONS, cwd=temporary_folder()) for _ in range(2)
    )
    assert len(first.losses) == 20
    assert first.losses == again.losses
    assert checkpoint_files(first) == checkpoint_files(again)
