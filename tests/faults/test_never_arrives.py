"""A worker never arrives: it is named, everything ends with 3, and nothing aborts or waits for ever."""

import pytest
from support.jobs import launcher, run, started

FROZEN = """
import os, signal, sys

if (os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")) == sys.argv[1]:
    os.kill(os.getpid(), signal.SIGSTOP)
import runpy
sys.argv = ["hvdtrain", "--task", "digits", "--framework", "torch", "--run-dir", "run"]
runpy.run_module("hvdtrain", run_name="__main__")
"""
LIMIT = 5
MOST_SECONDS = 240  # most of it is the start of the frameworks; nothing else ends a frozen worker


@pytest.mark.parametrize(("controller", "rank"), [("gloo", 0), ("mpirun", 1)])
def test_a_worker_that_is_frozen_before_horovod_starts_is_named(controller, rank, tmp_path):
    (tmp_path / "frozen.py").write_text(FROZEN)
    command = [*launcher(2, controller), "python", "frozen.py", str(rank)]
    with started(command, tmp_path, HOROVOD_START_TIMEOUT=str(LIMIT)) as job:
        result = job.wait(MOST_SECONDS)
    assert result.returncode == 3, result.output
    assert f"hvdtrain: rank {1 - rank} on " in result.output
    assert f"not all of the 2 workers started Horovod within {LIMIT} s; " in result.output
    assert f"stopped on this host: rank {rank} (process " in result.output
    missing = f"horovodrun: rank {rank} (host localhost, slot {rank}) did not start Horovod within {LIMIT} s"
    assert controller == "mpirun" or missing in result.output
    assert "terminate called" not in result.output
    assert not (tmp_path / "run").exists()


SCRIPT = """
import os, pathlib, time

import horovod.torch as hvd
import torch

rank, refused = int(os.environ["HOROVOD_RANK"]), pathlib.Path("refused")
while rank and not refused.exists():
    time.sleep(0.05)
while True:
    try:
        hvd.init()
        break
    except ValueError as error:
        print("refused:", error, flush=True)
        refused.touch()
print("together:", int(hvd.allreduce(torch.ones(1), op=hvd.Sum)), flush=True)
if rank == 0:
    hvd.allreduce(torch.ones(1), name="only.here")
time.sleep(600)
"""


def test_over_gloo_a_late_worker_raises_and_a_stalled_one_is_named(tmp_path):
    """Of Horovod itself: a failed start can be repeated, and its stall check knows the ranks."""
    (tmp_path / "script.py").write_text(SCRIPT)
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "4", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}
    command = [*launcher(2, "gloo"), "python", "script.py"]
    result = run(command, tmp_path, HOROVOD_GLOO_TIMEOUT_SECONDS="3", **limits)
    assert result.returncode == 1, result.output
    assert "refused: Horovod initialization failed: " in result.stdout
    assert "Wait timeout after 3 seconds for key(s): 1" in result.stdout
    assert result.stdout.count("together: 2") == 2
    assert "1!: [allreduce.only.here]" in result.stderr
