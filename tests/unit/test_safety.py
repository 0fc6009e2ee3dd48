"""Files from elsewhere are data, and files of a run have the permissions that the user's umask gives."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_a_run_has_the_permissions_of_the_umask(tmp_path, umask):
    command = ["python", "-m", "hvdtrain", "--framework", "torch", "--steps", "2", "--run-dir", "run"]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ,
        umask=umask,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert any(path.name == "model.safetensors" for path in paths)
    for path in paths:
        full = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == full & ~umask, path


def test_weights_that_need_code_to_be_loaded_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    trace = tmp_path / "was-here"

    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {trace}",)

    torch.save({"weight": Attack()}, tmp_path / "weights.pt")
    command = ["python", "-m", "hvdtrain", "import", "weights.pt", "--output", "out"]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not trace.exists()
