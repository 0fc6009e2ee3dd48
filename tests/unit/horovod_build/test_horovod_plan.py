"""What a build needs and finds, and the key that follows; what is installed, and whether a job may start."""

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import plan, toolchain
from hvdtrain.horovod_build.installed import (
    InstalledBuild,
    InstalledFramework,
    installed_build,
    require_horovod,
)
from hvdtrain.horovod_build.patching import horovod_patches
from hvdtrain.horovod_build.plan import BuildRequest

TORCH = InstalledFramework("torch", "2.13.0+cpu")
TENSORFLOW = InstalledFramework("tf", "2.21.0")


MPI = plan.Mpi("Open MPI", "5.0.11", Path(sys.prefix) / "bin", (Path(sys.prefix) / "lib",))
GPU = toolchain.Gpu(Path("/cuda"), "13.0", Path("/nccl/include"), Path("/nccl/lib/libnccl.so.2"), "2.28.9")
CHANGES = [
    {"frameworks": {"torch": InstalledFramework("torch", "2.12.0"), "tf": TENSORFLOW}},
    {"frameworks": {"torch": dataclasses.replace(TORCH, cxx11_abi=False), "tf": TENSORFLOW}},
    {"frameworks": {"tf": TENSORFLOW}},
    {"mpi": None},
    {"mpi": dataclasses.replace(MPI, programs=Path("/opt/mpi/bin"))},
    {"gpu": GPU},
    {"gpu": dataclasses.replace(GPU, nccl="2.27.0")},
    {"toolchain": toolchain.Toolchain("c++", "c++ 15.1.0", Path("cmake"))},
    {"arch_flags": "-mavx -mfma"},
    {"rpath": ("/usr/lib",)},
]


def test_the_key_changes_with_every_part_of_the_plan_and_what_it_is_built_with(the_plan, monkeypatch):
    keys = {the_plan.key, *(dataclasses.replace(the_plan, **change).key for change in CHANGES)}
    assert len(keys) == 1 + len(CHANGES)
    for change in (
        lambda: monkeypatch.setattr(plan, "horovod_patches", lambda: horovod_patches()[1:]),
        lambda: monkeypatch.setattr(plan, "RECIPE", plan.RECIPE + 1),
        lambda: monkeypatch.setattr(plan.importlib.machinery, "EXTENSION_SUFFIXES", [".cpython-399.so"]),
        lambda: monkeypatch.setattr(plan.sysconfig, "get_platform", lambda: "linux-riscv64"),
        lambda: monkeypatch.setenv("CXXFLAGS", "-O0"),
        lambda: monkeypatch.setattr(plan, "SDIST_SHA256", "0" * 64),
    ):
        change()
        assert the_plan.key not in keys
        keys.add(the_plan.key)


def test_every_missing_tool_is_named_at_once_with_how_to_get_it(no_programs):
    with pytest.raises(HorovodBuildError) as error:
        toolchain.find_toolchain()
    for part in ("no C++ compiler", "install build-essential", "no make", "no CMake 3.18", "pip install"):
        assert part in error.value.problem


def chosen(**request):
    return plan._choose_frameworks(BuildRequest(**request))


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("torch", "2.3.1+cpu", "is too old: hvdtrain needs 2"),
        ("tf", "2.15.1", "is too old: hvdtrain needs 2"),
        ("torch", "2.13.0", r"has no C\+\+ headers"),
        ("tf", None, "Not installed in this environment: TensorFlow"),
    ],
)
def test_a_framework_that_cannot_be_built_for_is_refused_by_name(site, name, version, message):
    if version is not None:
        (site.torch if name == "torch" else site.tensorflow)(version)
    shutil.rmtree(site.folder / "torch" / "include", ignore_errors=True)
    with pytest.raises(HorovodBuildError, match=message) as error:
        chosen(frameworks=name)
    assert "pip install" in error.value.remedy


@pytest.mark.parametrize(
    ("version", "header", "standard"), [("2.13.0", "201703L", 17), ("2.14.1+cu130", "202002L", 20)]
)
def test_the_standard_is_the_one_that_pytorchs_headers_require(site, version, header, standard):
    site.torch(version, standard=header)
    assert chosen()[0]["torch"].cxx_standard == standard


def test_a_gpu_build_leaves_out_what_was_built_for_another_cuda(site):
    site.torch("2.11.0+cu130", cuda="13.0")
    site.tensorflow(cuda="12.5.1")
    frameworks, left_out = chosen(gpu="nccl")
    assert list(frameworks) == ["torch"]
    assert left_out[0].startswith("Left out: TensorFlow 2.21.0 was built with CUDA 12.5.1, not 13.")


def test_mpi_that_is_required_must_be_there(site, no_programs, the_plan, monkeypatch):
    site.torch()
    monkeypatch.setattr(plan, "find_toolchain", lambda: the_plan.toolchain)
    with pytest.raises(HorovodBuildError, match="--mpi require") as error:
        plan.make_plan(BuildRequest(mpi="require"))
    assert "--mpi none" in error.value.remedy


@pytest.fixture
def cuda(tmp_path, no_programs, monkeypatch, program):
    """A CUDA 13.0 toolkit with an NCCL beside it, and no other."""
    home = tmp_path / "cuda"
    program(home / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    for path, text in (
        ("include/nccl.h", "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"),
        ("lib/libnccl.so.2", ""),
    ):
        (home / path).parent.mkdir(exist_ok=True)
        (home / path).write_text(text)
    monkeypatch.setenv("CUDA_HOME", str(home))
    for name in ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME", "NCCL_HOME", "HOROVOD_BUILD_CUDA_CC_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "packages_folder", lambda: tmp_path / "none")
    return home


def test_the_toolkit_and_nccl_are_found(cuda):
    found = toolchain.find_gpu("13")
    assert (found.cuda_home, found.cuda, found.nccl) == (cuda, "13.0", "2.28.9")
    assert found.nccl_library == cuda / "lib" / "libnccl.so.2"


def test_a_build_of_ours_is_read_and_described(site):
    site.ours()
    build = installed_build()
    assert build == InstalledBuild(
        "0.28.1", TORCH.version, TENSORFLOW.version, "Open MPI 5.0.11", True, False, "e" * 12, "k" * 16
    )
    assert build.describe() == (
        "0.28.1 for torch 2.13.0+cpu and TensorFlow 2.21.0; MPI (Open MPI 5.0.11), Gloo"
    )


def test_a_fitting_build_is_accepted(site):
    site.torch()
    site.tensorflow()
    site.ours()
    assert require_horovod("torch").patches
    assert require_horovod("tf").patches


def test_a_fitting_stock_horovod_is_accepted(site):
    site.torch()
    site.horovod(extensions=["torch"], pytorch=TORCH.version)
    assert require_horovod("torch").patches == ""


def refused(framework: str) -> HorovodBuildError:
    with pytest.raises(HorovodBuildError) as error:
        require_horovod(framework)
    assert "python -m hvdtrain build-horovod" in error.value.remedy
    assert error.value.exit_code == 3
    return error.value


def test_a_missing_framework_is_refused_with_how_to_install_it_and_a_missing_extension(site):
    error = refused("tf")
    assert "TensorFlow is not installed" in error.problem
    assert "pip install tensorflow" in error.remedy
    site.torch()
    site.tensorflow()
    site.ours(extensions=["torch"])
    assert "no extension for TensorFlow" in refused("tf").problem
    assert require_horovod("torch")


@pytest.mark.parametrize("metadata", ["[1]", '{"hvdtrain": [1]}', "{"])
def test_a_build_with_a_damaged_record_is_refused(site, metadata):
    site.torch()
    site.ours()
    (site.folder / "horovod" / "metadata.json").write_text(metadata)
    assert "no extension for PyTorch. It is not a build of hvdtrain" in refused("torch").problem


@pytest.mark.parametrize("version", ["2.13.1+cpu", "2.13.0+cu130"])
def test_a_build_for_another_version_is_refused(site, version):
    site.torch(version)
    site.ours()
    assert all(one in refused("torch").problem for one in (TORCH.version, version))
