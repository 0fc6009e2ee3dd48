"""A secret in the environment reaches the workers, and nothing that others can read."""

import os
import time
from pathlib import Path

import pytest
from hosts import Cluster
from support import jobs

SECRET = "rosebud-7f3a9c"


@pytest.mark.parametrize("controller", jobs.CONTROLLERS)
def test_a_secret_is_neither_printed_nor_on_a_command_line(tmp_path, controller):
    run = tmp_path / "run"
    with Cluster({"h1": 1, "h2": 1}, shared=tmp_path) as cluster:
        launcher = ["horovodrun", "--verbose", f"--{controller}", "-np", "2", "-H", cluster.words()]
        training = ["python", "-m", "hvdtrain", "--framework", "torch", "--steps", "40", "--debug"]
        words = [*launcher, *training, "--run-dir", str(run)]
        with cluster.head.started(words, cwd=tmp_path, MY_API_TOKEN=SECRET) as job:
            shown, arrived = _watch(job, os.readlink(f"/proc/{cluster.hosts['h2'].namespaces.pid}/ns/net"))
            result = job.wait(jobs.LIMIT_SECONDS)
    assert result.returncode == 0, result.output
    assert not shown, "the secret is on command lines"
    assert arrived, "the worker on the other host did not get it"
    assert SECRET not in result.output
    for path in run.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def _watch(job: jobs.started, network: str) -> tuple[set[str], bool]:
    """Give the command lines that showed the secret, and whether a worker in this network had it."""
    shown: set[str] = set()
    arrived = False
    deadline = time.monotonic() + jobs.LIMIT_SECONDS
    while job.process.poll() is None and time.monotonic() < deadline:
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    words = (folder / "cmdline").read_bytes()
                    if SECRET.encode() in words:
                        shown.add(words.replace(b"\0", b" ").decode(errors="replace")[:300])
                    if b"hvdtrain" in words and not arrived and os.readlink(folder / "ns/net") == network:
                        arrived = f"MY_API_TOKEN={SECRET}".encode() in (folder / "environ").read_bytes()
                except OSError:
                    pass
        time.sleep(0.02)
    return shown, arrived
