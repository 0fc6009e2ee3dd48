"""The patches for Horovod's source: exact, part of every installation; and the halves that they add."""

import ctypes
import dataclasses
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import building, patching
from hvdtrain.horovod_build.patching import apply_patches, horovod_patches, parse_patch, patches_digest

REPOSITORY = Path(__file__).parents[3]
PATCHES = horovod_patches()
CHANGES = [(patch, diff) for patch in PATCHES for diff in patch.files if not diff.is_new]

HEADER = "Subject: a change\nNeeded: always\nWhy: because\n of this\nUpstream: none found\n\n"
DIFF = "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-x\n+y\n"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_patch_applies_to_horovods_source(tree):
    for patch in PATCHES:
        apply_patches(tree, [patch])
        for diff in patch.files:
            lines = patching.split_lines((tree / diff.file).read_bytes().decode())
            shift = 0
            for hunk in diff.hunks:
                first = hunk.start - 1 + shift
                assert tuple(lines[first : first + len(hunk.after)]) == hunk.after, patch.name
                assert hunk.before != hunk.after, patch.name
                shift += len(hunk.after) - len(hunk.before)


@pytest.mark.parametrize(("patch", "diff"), [CHANGES[0], CHANGES[-1]], ids=["first", "last"])
def test_a_source_that_differs_stops_the_build_and_stays_as_it_is(tree, patch, diff):
    number, file, hunk = PATCHES.index(patch), diff.file, diff.hunks[-1]
    apply_patches(tree, PATCHES[:number])
    lines = patching.split_lines((tree / file).read_bytes().decode())
    lines[hunk.start - 1] = "something else\n"
    (tree / file).write_text("".join(lines))
    before = contents(tree)
    with pytest.raises(HorovodBuildError) as error:
        apply_patches(tree, PATCHES[number:])
    for part in (patch.name, file, hunk.title, f"line {hunk.start};", "'something else\\n'"):
        assert part in error.value.problem
    assert contents(tree) == before


def test_a_file_that_a_patch_creates_and_that_exists_stops_the_build(tmp_path):
    new = parse_patch("build/0001-new", HEADER + "--- /dev/null\n+++ b/a.txt\n@@ -0,0 +1 @@\n+x\n")
    apply_patches(tmp_path, [new])
    assert (tmp_path / "a.txt").read_text() == "x\n"
    with pytest.raises(HorovodBuildError, match=r"build/0001-new does not match a\.txt: it exists already"):
        apply_patches(tmp_path, [new])


@pytest.mark.parametrize("made", [[], ["patches/build", "patches/launcher"]], ids=["missing", "empty"])
def test_an_installation_without_patches_is_an_error(tmp_path, monkeypatch, made):
    for folder in made:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(patching, "files", lambda package: tmp_path)
    with pytest.raises(HorovodBuildError, match=r"There are no patches for Horovod in .*build") as error:
        horovod_patches.__wrapped__()
    assert "install it again" in error.value.remedy


def test_the_digest_follows_what_is_done_and_not_the_reasons():
    patch = parse_patch("build/0001-one", HEADER + DIFF)
    assert patches_digest([patch]) == patches_digest([dataclasses.replace(patch, header={"Why": "other"})])
    other_reason = parse_patch("build/0009-renamed", HEADER.replace("because", "for") + DIFF)
    assert patches_digest([patch]) == patches_digest([other_reason])
    for part in ("a.txt", "-x", "+y"):
        changed = parse_patch("build/0001-one", HEADER + DIFF.replace(part, f"{part}z"))
        assert patches_digest([patch]) != patches_digest([changed])
    digests = {patches_digest(PATCHES), *(patches_digest(PATCHES[:count]) for count in range(len(PATCHES)))}
    assert len(digests) == len(PATCHES) + 1


def test_the_record_file_is_the_one_that_cmake_reads(patched):
    line = f'file(READ "${{PROJECT_SOURCE_DIR}}/{building.RECORD_FILE}"'
    assert line in (patched / "CMakeLists.txt").read_text()


def test_a_wheel_that_is_built_from_the_source_distribution_holds_the_patches(tmp_path):
    source = tmp_path / "hvdtrain"
    shutil.copytree(REPOSITORY / "hvdtrain", source / "hvdtrain")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(REPOSITORY / name, source / name)
    for kind in ("sdist", "wheel"):  # without the network
        code = f"from setuptools import build_meta; build_meta.build_{kind}({str(tmp_path)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=source, check=True)
        if kind == "sdist":
            shutil.unpack_archive(next(tmp_path.glob("*.tar.gz")), tmp_path / "unpacked")
            (source,) = (tmp_path / "unpacked").iterdir()
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as wheel:
        for patch in PATCHES:
            path = f"hvdtrain/horovod_build/patches/{patch.name}.patch"
            assert wheel.read(path) == (REPOSITORY / path).read_bytes()


PROBE = """
#include "half.cc"
using namespace horovod::common; using Half = uint16_t;
#define SUM(NAME, CALL) extern "C" void NAME(Half* c, const Half* a, const Half* b, size_t n) { CALL; }
SUM(f16c, SumFloat16(c, a, b, n))
SUM(loop, (Combine<ToFloat16, FromFloat16>(c, a, b, n, [](float x, float y) { return x + y; })))
SUM(bf16, SumBFloat16(c, a, b, n))
"""
ALL = np.arange(3, 2**16).astype(np.uint16)  # no whole number of vectors


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_sum_is_that_of_fp32_rounded_to_nearest_even(patched, tmp_path):
    (tmp_path / "probe.cc").write_text(PROBE)
    command = ["c++", "-std=c++17", "-O3", "-shared", "-fPIC", "probe.cc", "-o", "probe.so", "-I"]
    subprocess.run([*command, patched / "horovod/common"], cwd=tmp_path, check=True, timeout=120)
    compiled = ctypes.CDLL(str(tmp_path / "probe.so"))
    for name, kind in (("f16c", np.float16), ("loop", np.float16), ("bf16", ml_dtypes.bfloat16)):
        for other in range(0, 2**16, 331):
            found, second = ALL.copy(), np.full_like(ALL, other)
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in (found, found, second)]
            getattr(compiled, name)(*pointers, ctypes.c_size_t(len(found)))
            expected = (ALL.view(kind).astype(np.float32) + second.view(kind).astype(np.float32)).astype(kind)
            same = (found == expected.view(np.uint16)) | (np.isnan(found.view(kind)) & np.isnan(expected))
            assert same.all(), (name, hex(other))
