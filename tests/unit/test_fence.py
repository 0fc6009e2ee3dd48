"""The fence around hvdtrain/tools: nothing else imports it, and its folders can be deleted."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = sorted(path.parent.name for path in (ROOT / "hvdtrain" / "tools").glob("*/__init__.py"))
# all modules, and then the command line; frameworks take seconds to load
IMPORTS = """
import importlib, pkgutil, sys, hvdtrain
def failed(name):
    raise
for module in pkgutil.walk_packages(hvdtrain.__path__, "hvdtrain.", onerror=failed):
    words = module.name.split(".")
    if not {"torch", "tensorflow", "cli", "__main__"} & set(words):
        importlib.import_module(module.name)
from hvdtrain.__main__ import run
sys.argv = ["hvdtrain", "--help"]
run()
"""


def test_a_folder_of_tools_imports_no_other_one():
    """That the command line alone imports them is a contract of setup.cfg."""
    for name in TOOLS:
        for path in (ROOT / "hvdtrain" / "tools" / name).rglob("*.py"):
            others = set(re.findall(r"\bhvdtrain\.tools\.(\w+)", path.read_text())) & set(TOOLS) - {name}
            assert not others, path


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the copy of the package."""
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_folders_of_tools_can_be_deleted(tmp_path):
    """All at once: that none needs another one is read from their imports."""
    shutil.copytree(ROOT / "hvdtrain", tmp_path / "hvdtrain", ignore=shutil.ignore_patterns("__pycache__"))
    for name in TOOLS:
        shutil.rmtree(tmp_path / "hvdtrain" / "tools" / name)
    done = python(tmp_path, "-W", "ignore", "-c", IMPORTS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")
    refused = python(tmp_path, "-m", "hvdtrain", "lr-find", "--rising-steps", "9")
    assert refused.returncode == 2
    assert "lr-find needs hvdtrain.tools.search" in refused.stderr
