"""Workers that are not about to do the same: all end within seconds, and one says who differs in what."""

import socket

import pytest
from endings import SOON_WITH_IMPORT_SECONDS, TASKS, Ending, end_of, run_to_end

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> Ending:
    """Two commands under one mpirun, which differ in two options."""
    parts = []
    for given in (["--seed", "1", "--momentum", "0.5"], ["--seed", "2", "--momentum", "0.25"]):
        training = ["python", "-m", "hvdtrain", "--framework", "torch", "--task", f"{TASKS}:Sound"]
        parts.append(["-np", "1", *training, "--run-dir", "run", *given])
    command = ["mpirun", "--bind-to", "none", "--oversubscribe", *parts[0], ":", *parts[1]]
    return run_to_end(command, tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> Ending:
    return end_of(2, "mpi", "OtherShape", "--framework", "torch", cwd=tmp_path_factory.mktemp("job"))


@pytest.fixture(params=["options", "shape"])
def ending(request) -> Ending:
    return request.getfixturevalue(request.param)


def test_exit_code_says_that_the_environment_is_at_fault(ending):
    assert ending.returncode == 3


def test_every_worker_ends_without_waiting_for_a_limit(ending):
    assert ending.seconds < SOON_WITH_IMPORT_SECONDS


def test_it_is_said_once_and_without_a_traceback(ending):
    assert ending.output.count("the workers disagree before training") == 1
    assert "Traceback" not in ending.output


def test_no_run_directory_is_made(ending):
    assert not (ending.folder / "run").exists()


def test_options_are_named_with_both_values(options):
    assert f"seed: 1 on rank 0 ({HOST}), 2 on rank 1 ({HOST})" in options.output
    assert f"momentum: 0.5 on rank 0 ({HOST}), 0.25 on rank 1 ({HOST})" in options.output


def test_the_shape_of_a_parameter_is_named_with_both_values(shape):
    assert f"kernel: (4, 5) on rank 0 ({HOST}), (4, 8) on rank 1 ({HOST})" in shape.output
