"""The fence around hvdtrain/tools: nothing else imports it, and its folders can be deleted."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = sorted(path.parent.name for path in (ROOT / "hvdtrain" / "tools").glob("*/__init__.py"))
# names of the package, each of which is looked up when it is used
LAZY = "__init__.py"
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


def imported(path: Path) -> set[str]:
    """Return what a file imports anywhere, modules and names of them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_a_folder_of_tools_is_imported_by_itself_and_the_command_line_alone():
    for path in (ROOT / "hvdtrain").rglob("*.py"):
        name = path.relative_to(ROOT / "hvdtrain").as_posix()
        if name.startswith("cli/") or name == LAZY:
            continue
        own = ".".join(["hvdtrain", *name.split("/")[:2]]) if name.startswith("tools/") else ""
        folders = {f"hvdtrain.tools.{folder}" for folder in TOOLS} if own else {"hvdtrain.tools"}
        found = {one for one in imported(path) if any(f"{one}.".startswith(f"{f}.") for f in folders - {own})}
        assert not found, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the package without any folder of its tools."""
    target = tmp_path_factory.mktemp("copy")
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hvdtrain", target / "hvdtrain", ignore=leave_out)
    for name in TOOLS:
        shutil.rmtree(target / "hvdtrain" / "tools" / name)
    return target


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the copy of the package."""
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_folders_of_tools_can_be_deleted(folder):
    """All at once: that none needs another one is read from their imports."""
    done = python(folder, "-W", "ignore", "-c", IMPORTS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")


def test_a_job_needs_no_tools(folder):
    words = ("--framework", "torch", "--steps", "2", "--eval-every", "null", "--run-dir", "run")
    done = python(folder, "-m", "hvdtrain", *words)
    assert done.returncode == 0, done.stderr
    assert (folder / "run" / "metrics.jsonl").is_file()
    refused = python(folder, "-m", "hvdtrain", "lr-find", "--rising-steps", "9")
    assert refused.returncode == 2
    assert "lr-find needs hvdtrain.tools.search" in refused.stderr
