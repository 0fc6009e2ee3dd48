"""What tests on several hosts share: nothing of a cluster may be left on the machine."""

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def _machine_as_it_was():
    """Fail the session that leaves a mount, an interface or a folder of a cluster behind."""
    before = _state()
    yield
    left = {kind: sorted(now - before[kind]) for kind, now in _state().items()}
    assert not any(left.values()), f"left on this machine: {left}"


def _state() -> dict[str, set[str]]:
    mounts = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=False).stdout
    return {"mounts": mounts, "links": {line.split()[0] for line in links.splitlines()}}
