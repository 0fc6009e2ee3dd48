"""Files from elsewhere are data, and files of a run have the permissions that the user's umask gives."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest


def hvdtrain(folder, *words, **options):
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    options |= {"cwd": folder, "env": environ, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(["python", "-m", "hvdtrain", *words], check=False, **options)


def test_a_run_has_the_permissions_of_the_umask(tmp_path):
    done = hvdtrain(tmp_path, "--framework", "torch", "--steps", "2", "--run-dir", "run", umask=0o027)
    assert done.returncode == 0, done.stderr
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert any(path.name == "model.safetensors" for path in paths)
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


def test_weights_that_need_code_to_be_loaded_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    trace = tmp_path / "was-here"

    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {trace}",)

    torch.save({"weight": Attack()}, tmp_path / "weights.pt")
    done = hvdtrain(tmp_path, "import", "weights.pt", "--output", "out")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not trace.exists()
