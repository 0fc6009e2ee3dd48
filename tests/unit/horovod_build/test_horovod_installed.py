"""What is installed, and whether a job may start on it."""

import pytest

from hvdtrain.doctor.software import software_info
from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import InstalledBuild, check_patches, installed_build, require_horovod

TORCH = "2.13.0+cpu"
TENSORFLOW = "2.21.0"


def test_nothing_is_installed(site):
    assert installed_build() is None


def test_a_build_of_ours_is_read_and_described(site):
    site.ours()
    build = installed_build()
    assert build == InstalledBuild(
        "0.28.1", TORCH, TENSORFLOW, "Open MPI 5.0.11", True, False, "e" * 12, "k" * 16
    )
    assert build.describe() == (
        "0.28.1 for torch 2.13.0+cpu and TensorFlow 2.21.0; MPI (Open MPI 5.0.11), Gloo"
    )


def test_builds_with_other_patches_are_told_apart(site):
    """What hosts and workers compare has the digest; what a user reads of a build has not."""
    site.ours(extensions=["torch"])
    build = installed_build()
    assert build.identify() == f"{build.describe()}; patches {'e' * 12}"
    assert software_info((), 1.0)["versions"]["Horovod"] == build.identify()


def test_a_stock_horovod_is_identified_without_patches(site):
    site.horovod(extensions=["torch"], pytorch=TORCH)
    assert installed_build().identify() == installed_build().describe()


def test_a_gpu_build_with_other_patches_is_mended_by_a_gpu_build(site):
    site.ours(have_nccl=True)
    assert check_patches(installed_build(), elastic=False).endswith("build-horovod --gpu nccl")
    with pytest.raises(HorovodBuildError) as error:
        check_patches(installed_build(), elastic=True)
    assert error.value.remedy.endswith("build-horovod --gpu nccl")


def test_a_build_without_an_extension_was_not_built_for_it(site):
    site.ours(extensions=["torch"])
    assert installed_build().tensorflow is None


def test_a_build_for_gpus_without_mpi_is_described(site):
    site.ours(extensions=["torch"], have_mpi=False, have_nccl=True)
    assert installed_build().describe() == "0.28.1 for torch 2.13.0+cpu; Gloo, NCCL"


def test_a_stock_horovod_is_told_from_ours(site):
    site.horovod(extensions=["torch"], pytorch=TORCH)
    assert installed_build().patches == ""
    assert installed_build().describe() == "0.28.1 for torch 2.13.0+cpu; not built by hvdtrain"


def test_a_build_from_before_there_were_patches_is_ours(site):
    site.ours(hvdtrain={"key": "k" * 16, "edits": "e" * 12})
    assert installed_build().patches == "e" * 12
    assert "not built by hvdtrain" not in installed_build().describe()


def test_unreadable_metadata_does_not_raise(site):
    site.ours()
    (site.folder / "horovod" / "metadata.json").write_text("{")
    assert installed_build().torch is None


@pytest.mark.parametrize("framework", ["torch", "tf"])
def test_a_fitting_build_is_accepted(site, framework):
    site.torch()
    site.tensorflow()
    site.ours()
    assert require_horovod(framework).patches


def test_a_fitting_stock_horovod_is_accepted(site):
    site.torch()
    site.horovod(extensions=["torch"], pytorch=TORCH)
    assert require_horovod("torch").patches == ""


def refused(framework: str) -> HorovodBuildError:
    with pytest.raises(HorovodBuildError) as error:
        require_horovod(framework)
    assert "python -m hvdtrain build-horovod" in error.value.remedy
    assert error.value.exit_code == 3
    return error.value


def test_a_missing_framework_is_refused_with_how_to_install_it(site):
    error = refused("tf")
    assert "TensorFlow is not installed" in error.problem
    assert "pip install tensorflow" in error.remedy


def test_a_missing_horovod_is_refused(site):
    site.torch()
    assert "Horovod is not installed" in refused("torch").problem


def test_a_missing_extension_is_refused(site):
    site.torch()
    site.tensorflow()
    site.ours(extensions=["torch"])
    assert "no extension for TensorFlow" in refused("tf").problem
    assert require_horovod("torch")


@pytest.mark.parametrize("version", ["2.13.1+cpu", "2.13.0+cu130"])
def test_a_build_for_another_version_is_refused(site, version):
    site.torch(version)
    site.ours()
    problem = refused("torch").problem
    assert TORCH in problem
    assert version in problem


def test_a_stock_horovod_for_another_version_is_refused_as_such(site):
    site.torch("2.14.0")
    site.horovod(extensions=["torch"], pytorch=TORCH)
    assert "not a build of hvdtrain" in refused("torch").problem


def test_a_gpu_build_is_mended_by_a_gpu_build(site):
    site.torch("2.14.0")
    site.ours(have_nccl=True)
    assert refused("torch").remedy.endswith("build-horovod --gpu nccl")


def test_two_spellings_of_a_release_candidate_are_one_version(site):
    site.tensorflow("2.22.0rc0")
    site.ours(tensorflow="2.22.0-rc0")
    assert require_horovod("tf")
