"""The dry run fails on one worker while another waits in synchronised batch norm: all end soon."""

import re
import socket

import pytest
from endings import SOON_SECONDS, TASKS, Ending, end_of


@pytest.fixture(scope="module", params=[("torch", "gloo")], ids="-".join)
def ending(request, tmp_path_factory) -> Ending:
    framework, controller = request.param
    options = ("--framework", framework, "--sync-batch-norm")
    return end_of(2, controller, "DryRunRaises", *options, cwd=tmp_path_factory.mktemp("job"))


def test_every_worker_ends_soon(ending):
    assert ending.returncode == 2
    assert ending.seconds_since_failure() < SOON_SECONDS


def test_the_error_is_said_once_with_rank_line_and_shapes(ending):
    (line,) = re.findall(r"hvdtrain: .*", ending.output)
    assert line.startswith(
        f"hvdtrain: rank 1 on {socket.gethostname()}: the first batch of the training data fails"
    )
    assert re.search(rf"{TASKS}, line \d+: ValueError: .*the flux capacitor is empty", line)
    assert ending.output.count("It has inputs float32 (4, 4), targets float32 (4, 3)") == 1
    assert "Traceback" not in ending.output


def test_no_run_directory_is_made(ending):
    assert not (ending.folder / "run").exists()
