"""What is installed, and whether a job may start on it."""

import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.installed import InstalledBuild, installed_build, require_horovod

TORCH = "2.13.0+cpu"
TENSORFLOW = "2.21.0"


def test_a_build_of_ours_is_read_and_described(site):
    site.ours()
    build = installed_build()
    assert build == InstalledBuild(
        "0.28.1", TORCH, TENSORFLOW, "Open MPI 5.0.11", True, False, "e" * 12, "k" * 16
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


def test_a_missing_extension_is_refused(site):
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
    assert all(one in refused("torch").problem for one in (TORCH, version))
