"""Horovod's source, and fakes of what a build of it finds: packages, programs, a cache."""

import importlib
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import plan, toolchain
from hvdtrain.horovod_build.cache import BuildCache, fetch_source, unpack
from hvdtrain.horovod_build.installed import InstalledFramework
from hvdtrain.horovod_build.patching import apply_patches, horovod_patches

SUFFIX = ".cpython-fake.so"

# What a build of hvdtrain writes beside itself.
OURS = {
    "pytorch": "2.13.0+cpu",
    "tensorflow": "2.21.0",
    "have_mpi": True,
    "have_gloo": True,
    "have_nccl": False,
    "hvdtrain": {"key": "k" * 16, "patches": "e" * 12, "mpi": "Open MPI 5.0.11"},
}


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """Horovod's source as it was published, from the cache of builds or the package index."""
    try:
        archive = fetch_source(BuildCache())
    except HorovodBuildError as error:
        pytest.skip(f"Horovod's source is neither in the cache nor to be had: {error}")
    return unpack(archive, tmp_path_factory.mktemp("pristine"))


def copy_patched_files(source: Path, target: Path) -> Path:
    """Copy the files that some patch changes, and no others; those that a patch creates do not exist yet."""
    diffs = [diff for patch in horovod_patches() for diff in patch.files]
    for file in {diff.file for diff in diffs} - {diff.file for diff in diffs if diff.is_new}:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, target / file)
    return target


@pytest.fixture
def tree(pristine, tmp_path) -> Path:
    """The files that some patch changes, unchanged, to be written to."""
    return copy_patched_files(pristine, tmp_path / "tree")


@pytest.fixture(scope="session")
def patched(pristine, tmp_path_factory) -> Path:
    """Horovod's patched source. Its runner can be imported: it is Python alone."""
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(pristine / "horovod", folder / "horovod")
    copy_patched_files(pristine, folder)
    apply_patches(folder, horovod_patches())
    return folder


@pytest.fixture
def horovod(patched):
    """Import modules of the patched source, whichever Horovod is installed."""

    def ours(name: str) -> bool:
        return name == "horovod" or name.startswith("horovod.")

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if ours(name)}
    sys.path.insert(0, str(patched))
    yield importlib.import_module
    sys.path.remove(str(patched))
    for name in list(sys.modules):
        if ours(name):
            del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def program() -> Callable[[Path, str], Path]:
    """Writes a program, a shell script."""

    def write(path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def the_plan() -> plan.Plan:
    """A build for both frameworks with an MPI of the environment."""
    prefix = Path(sys.prefix)
    return plan.Plan(
        frameworks={
            "torch": InstalledFramework("torch", "2.13.0+cpu"),
            "tf": InstalledFramework("tf", "2.21.0"),
        },
        mpi=plan.Mpi("Open MPI", "5.0.11", prefix / "bin", (prefix / "lib",)),
        gpu=None,
        toolchain=toolchain.Toolchain("c++", "c++ 12.2.0", Path("cmake")),
        arch_flags="-mavx",
        rpath=("$ORIGIN/../../../..",),
    )


class FakeSite:
    """A site-packages folder whose packages fail when they are imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def package(self, name: str, distribution: str, version: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        return folder

    def torch(self, version: str = "2.13.0+cpu", cuda: str | None = None, standard: str = "201703L") -> None:
        folder = self.package("torch", "torch", version.partition("+")[0])
        header = folder / "include" / "ATen" / "ATen.h"
        header.parent.mkdir(parents=True)
        header.write_text(
            f"#pragma once\n#if !defined(_MSC_VER) && __cplusplus < {standard}\n#error\n#endif\n"
        )
        (folder / "lib").mkdir()
        for name in ("c10", "torch", "torch_cpu", "torch_python"):
            (folder / "lib" / f"lib{name}.so").touch()
        (folder / "version.py").write_text(
            f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
        )

    def tensorflow(self, version: str = "2.21.0", cuda: str = "") -> None:
        folder = self.package("tensorflow", "tensorflow-cpu", version) / "python" / "platform"
        folder.mkdir(parents=True)
        folder.joinpath("build_info.py").write_text(
            f"OrderedDict([('cuda_version', '{cuda}')])" if cuda else ""
        )

    def ours(self, extensions=("torch", "tf"), **metadata) -> None:
        self.horovod(extensions, **{**OURS, **metadata})

    def horovod(self, extensions=("torch", "tf"), **metadata) -> None:
        folder = self.package("horovod", "horovod", "0.28.1")
        names = {"torch": "torch/mpi_lib_v2", "tf": "tensorflow/mpi_lib"}
        records = []
        for extension in extensions:
            path = folder / (names[extension] + SUFFIX)
            path.parent.mkdir()
            path.write_bytes(b"1234")
            records.append(f"{path.relative_to(self.folder)},,4\n")
        (self.folder / "horovod-0.28.1.dist-info" / "RECORD").write_text("".join(records))
        (folder / "metadata.json").write_text(json.dumps(metadata))


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    standard = [path for path in sys.path if "site-packages" not in path and path]
    monkeypatch.setattr(sys, "path", [str(folder), *standard])
    monkeypatch.setattr("importlib.machinery.EXTENSION_SUFFIXES", [SUFFIX])
    for name in ("torch", "tensorflow", "horovod"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return FakeSite(folder)


@pytest.fixture
def no_programs(tmp_path, monkeypatch):
    """An environment and a PATH without any program."""
    empty = tmp_path / "bin"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    for name in ("CXX", "HOROVOD_CMAKE", "MPI_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "scripts_folder", lambda: empty)
    monkeypatch.setattr(plan, "scripts_folder", lambda: empty)
    return empty


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path))
    return BuildCache()


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("horovod/__init__.py", "a module")
    return path
