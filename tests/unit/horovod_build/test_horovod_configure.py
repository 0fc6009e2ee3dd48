"""The configure step of a build, by CMake itself, with a stand-in for PyTorch that cannot be imported."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import ROOT

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import BuildRequest, compiling, plan
from hvdtrain.horovod_build.frameworks import OLDEST, installed_framework
from hvdtrain.horovod_build.patching import apply_patches, horovod_patches
from hvdtrain.horovod_build.plan import make_plan
from hvdtrain.horovod_build.toolchain import Toolchain, find_toolchain


@pytest.mark.parametrize(
    ("version", "header", "standard"), [("2.13.0", "201703L", 17), ("2.14.1+cu130", "202002L", 20)]
)
def test_the_standard_is_the_one_that_pytorchs_headers_ask_for(site, version, header, standard):
    site.torch(version, standard=header)
    assert installed_framework("torch").cxx_standard == standard


def test_a_pytorch_without_headers_is_refused(site):
    site.torch()
    shutil.rmtree(site.folder / "torch" / "include")
    with pytest.raises(HorovodBuildError, match=r"PyTorch 2\.13\.0\+cpu in .* has no C\+\+ headers") as error:
        make_plan(BuildRequest())
    assert "pip install --force-reinstall" in error.value.remedy


@pytest.mark.parametrize(("name", "version"), [("torch", "2.3.1+cpu"), ("tf", "2.15.1")])
def test_a_framework_before_the_range_is_refused_by_name(site, name, version):
    (site.torch if name == "torch" else site.tensorflow)(version)
    with pytest.raises(HorovodBuildError, match=rf"{version[:5]}.* is too old: hvdtrain needs 2\.") as error:
        make_plan(BuildRequest(frameworks=name))
    assert "pip install --upgrade" in error.value.remedy


def test_a_framework_before_the_range_is_left_out_if_there_is_another_one(site, the_plan, monkeypatch):
    site.torch("2.14.1", standard="202002L")
    site.tensorflow("2.15.1")
    monkeypatch.setattr(plan, "find_toolchain", lambda folder, frameworks: the_plan.toolchain)
    found = make_plan(BuildRequest(mpi="none"))
    assert list(found.frameworks) == ["torch"]
    (said,) = found.left_out
    assert said.startswith("Left out: TensorFlow 2.15.1 is too old: hvdtrain needs 2.18 or newer.")


def test_the_ranges_are_those_of_setup_cfg():
    text = (ROOT / "setup.cfg").read_text()
    assert f"    torch>={OLDEST['torch']}\n" in text
    assert f"    tensorflow>={OLDEST['tf']}\n" in text
    assert f"    tensorflow-cpu>={OLDEST['tf']}\n" in text


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Toolchain:
    """The compiler and CMake of this machine, found before there are stand-ins."""
    return find_toolchain(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def source(pristine, tmp_path_factory) -> Path:
    """The whole patched source."""
    folder = shutil.copytree(pristine, tmp_path_factory.mktemp("source") / "horovod")
    apply_patches(folder, horovod_patches())
    (folder / compiling.RECORD_FILE).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("version", "header", "standard"),
    [("2.13.0+cu130", "201703L", "17"), ("2.14.1+cu130", "202002L", "20")],
)
def test_a_build_for_cpus_does_not_ask_pytorch_or_look_for_cuda(
    *, source, site, the_plan, tools, tmp_path, program, monkeypatch, version, header, standard
):
    """A CUDA build of PyTorch, an nvcc outside of its toolkit on PATH, and CUDA_HOME without CUDA."""
    site.torch(version, cuda="13.0", standard=header)
    asked = tmp_path / "asked"
    program(tmp_path / "bin" / "nvcc", f"echo nvcc >>{asked}; exit 1")
    notes = f'case "$*" in *import*torch*) echo "$*" >>{asked} ;; esac'
    python = program(tmp_path / "python", f'{notes}\nexec {sys.executable} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "bin"))
    torch = installed_framework("torch")
    build = dataclasses.replace(the_plan, frameworks={"torch": torch}, mpi=None, toolchain=tools)
    done = subprocess.run(
        [tools.cmake, source, f"-DPYTHON_EXECUTABLE={python}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
         "-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY_RELWITHDEBINFO={tmp_path}"],
        cwd=tmp_path, env=compiling.build_environment(build, tmp_path, 1), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not asked.exists(), asked.read_text()
    assert json.loads((tmp_path / "horovod" / "metadata.json").read_text())["pytorch"] == version
    commands = {
        Path(entry["file"]).name: entry["command"]
        for entry in json.loads((tmp_path / "compile_commands.json").read_text())
        if "pytorch.dir" in entry["output"]
    }
    of_torch = commands["mpi_ops_v2.cc"]
    assert f"-std=c++{standard}" in of_torch
    assert f"-isystem {site.folder}/torch/include/torch/csrc/api/include" in of_torch
    assert "-D_GLIBCXX_USE_CXX11_ABI=1" in of_torch
    assert not any("cuda_operations" in name or "HAVE_CUDA" in text for name, text in commands.items())
    link = (tmp_path / "horovod/torch/CMakeFiles/pytorch.dir/link.txt").read_text()
    # by folder and name, since the stand-ins are empty files
    assert f"-L{site.folder}/torch/lib " in link
    assert "-lc10 -ltorch -ltorch_cpu -ltorch_python" in link
    assert "cudart" not in link
