"""requirements/: complete, consistent with setup.cfg and constraints.txt, and installed by hash alone."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from support.documents import ROOT

FOLDER = ROOT / "requirements"


class Setup:
    """install.sh with a Python that only notes what pip is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.noted = folder / "requirements", folder / "noted"
        shutil.copytree(FOLDER, self.folder)
        self.python = folder / "python"
        self.versions = re.search(r"^torch===?(\S+)", (FOLDER / "torch-cpu.txt").read_text(), re.M)[1]

    def run(self, extras: str, **environ: str) -> tuple[int, list[str], str]:
        cases = f"*' index versions torch') echo '{self.versions}'; exit ;; *' index versions '*) exit 1 ;;"
        cases += " *check) exit ;;"
        self.python.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\necho "$*" >>{self.noted}\n')
        self.python.chmod(0o755)
        command = ["sh", str(self.folder / "install.sh"), str(self.python), extras, "--no-compile"]
        done = subprocess.run(
            command, env={"PATH": os.environ["PATH"], **environ}, capture_output=True, text=True, check=False
        )
        lines = self.noted.read_text().splitlines() if self.noted.exists() else []
        return done.returncode, [line.replace(f"{self.folder}/", "") for line in lines], done.stderr


def test_every_call_of_pip_demands_hashes_and_builds_nothing(tmp_path):
    code, calls, _ = Setup(tmp_path).run("torch,tf-cpu,test")
    assert (code, len(calls)) == (0, 2)
    for call in calls:
        assert call.startswith("-m pip install ")
        for option in ("--require-hashes", "--only-binary :all:", "--no-deps", "--no-compile"):
            assert option in call


def test_pytorch_alone_comes_from_its_index(tmp_path):
    setup = Setup(tmp_path)
    setup.versions = "2.13.0"  # elsewhere
    _, (torch, others), _ = setup.run("torch,openmpi", TORCH_INDEX="https://torch.example/cpu")
    assert torch.endswith("--index-url https://torch.example/cpu -r torch-cpu.txt")
    assert others.endswith("-r base.txt -r torch.txt -r openmpi.txt")
    assert "index" not in others


def test_an_extra_that_does_not_exist_is_named(tmp_path):
    code, calls, said = Setup(tmp_path).run("tensorflow")
    assert (code, calls) == (2, [])
    assert said.startswith("install.sh: there is no extra 'tensorflow' in setup.cfg")


def test_a_package_with_other_contents_is_not_installed(tmp_path):
    """With pip itself and a wheel made here."""
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    wheels.mkdir()
    wheel = wheels / "gift-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("gift.py", "")
        file.writestr("gift-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: gift\nVersion: 1.0\n")
        file.writestr(
            "gift-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("gift-1.0.dist-info/RECORD", "")
    shutil.copy(FOLDER / "install.sh", tmp_path)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    command = ["sh", str(tmp_path / "install.sh"), sys.executable, "", "--target", str(target)]
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    for digest, installed in (("0" * 64, False), (found, True)):
        (tmp_path / "base.txt").write_text(f"gift==1.0 \\\n    --hash=sha256:{digest}\n")
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is installed, done.stderr
        assert (target / "gift.py").exists() is installed
