"""The dry run fails on one worker while another waits in synchronised batch norm: all end soon."""

import re
import socket

from endings import SOON_SECONDS, TASKS, end_of


def test_the_error_is_said_once_with_rank_line_and_shapes_and_every_worker_ends_soon(tmp_path):
    ending = end_of(2, "gloo", "DryRunRaises", "--framework", "torch", "--sync-batch-norm", cwd=tmp_path)
    assert ending.returncode == 2
    assert ending.seconds_since_failure() < SOON_SECONDS
    (line,) = re.findall(r"hvdtrain: .*", ending.output)
    assert line.startswith(
        f"hvdtrain: rank 1 on {socket.gethostname()}: the first batch of the training data fails"
    )
    assert re.search(rf"{TASKS}, line \d+: ValueError: .*the flux capacitor is empty", line)
    assert ending.output.count("It has inputs float32 (4, 4), targets float32 (4, 3)") == 1
    assert "Traceback" not in ending.output
    assert not (tmp_path / "run").exists()
