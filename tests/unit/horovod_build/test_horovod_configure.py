"""The configure step of a build, by CMake itself, with a stand-in for PyTorch that cannot be imported."""

import shutil

import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import BuildRequest
from hvdtrain.horovod_build.installed import installed_framework
from hvdtrain.horovod_build.plan import make_plan


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
