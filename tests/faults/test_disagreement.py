"""Workers that are not about to do the same: all end within seconds, and one says who differs in what."""

import socket

from endings import SOON_WITH_IMPORT_SECONDS, TASKS, run_to_end
from support.pool import command

HOST = socket.gethostname()


def check(returncode: int, output: str, folder) -> None:
    assert returncode == 3
    assert output.count("the workers disagree before training") == 1
    assert "Traceback" not in output
    assert not (folder / "run").exists()


def test_options_are_named_with_both_values(tmp_path):
    """Two commands under one mpirun, which differ in two options."""
    parts = []
    for given in (["--seed", "1", "--momentum", "0.5"], ["--seed", "2", "--momentum", "0.25"]):
        training = ["python", "-m", "hvdtrain", "--framework", "torch", "--task", f"{TASKS}:Sound"]
        parts.append(["-np", "1", *training, "--run-dir", "run", *given])
    command = ["mpirun", "--bind-to", "none", "--oversubscribe", *parts[0], ":", *parts[1]]
    ending = run_to_end(command, tmp_path)
    check(ending.returncode, ending.output, tmp_path)
    assert ending.seconds < SOON_WITH_IMPORT_SECONDS, "no worker waits for a limit"
    assert f"seed: 1 on rank 0 ({HOST}), 2 on rank 1 ({HOST})" in ending.output
    assert f"momentum: 0.5 on rank 0 ({HOST}), 0.25 on rank 1 ({HOST})" in ending.output


def test_the_shape_of_a_parameter_is_named_with_both_values(tmp_path):
    words = ("--framework", "torch", "--task", f"{TASKS}:OtherShape", "--run-dir", "run")
    result = command(2, "mpi", "torch", *words, cwd=tmp_path)
    check(result.returncode, result.output, tmp_path)
    assert f"kernel: (4, 5) on rank 0 ({HOST}), (4, 8) on rank 1 ({HOST})" in result.output
