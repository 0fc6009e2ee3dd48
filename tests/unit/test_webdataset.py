"""Tars with an index: the samples that were written, in any order; damaged tars are refused."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from support import stream_files

import hvdtrain
from hvdtrain.data import webdataset as tar_index
from hvdtrain.data.datasets import fetch
from hvdtrain.data.webdataset import tar_samples
from hvdtrain.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tar-index"


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_tar(path, numbers, mode="w", **more):
    samples = []
    for number in numbers:
        files = {"png": png(number), "cls": b"%d" % number, "json": json.dumps({"a": 1}).encode()}
        samples.append((number, {**files, **{kind: make(number) for kind, make in more.items()}}))
    return stream_files.write_tar(path, samples, mode)


def open_three(folder, **options):
    for number, numbers in enumerate([range(7), range(7, 9), range(9, 20)]):
        write_tar(folder / f"t-{number}.tar", numbers)
    return hvdtrain.open_webdataset(folder / "t-{0..2}.tar", inputs="png", targets="cls", **options)


def test_samples_are_those_that_were_written(tmp_path):
    data = open_three(tmp_path)
    assert len(data) == 20
    assert data.notes == ("the column json is left out: not numbers",)
    found = fetch(data, np.asarray([19, 0, 6, 7, 8, 9]))
    assert found["targets"].tolist() == [19, 0, 6, 7, 8, 9]
    assert found["inputs"].shape == (6, 4, 5, 3)
    assert found["inputs"][:, 0, 0, 0].tolist() == [19, 0, 6, 7, 8, 9]


def test_the_index_is_made_once_and_again_when_a_tar_changes(tmp_path, cache, monkeypatch):
    open_three(tmp_path)
    scanned, scan = [], tar_index.scan
    monkeypatch.setattr(tar_index, "scan", lambda path: scanned.append(path) or scan(path))
    hvdtrain.open_webdataset(tmp_path, inputs="png")
    assert scanned == []
    write_tar(tmp_path / "t-1.tar", range(7, 10))
    assert len(hvdtrain.open_webdataset(tmp_path, inputs="png")) == 21
    assert scanned == [str(tmp_path / "t-1.tar")]  # once
    for kept in cache.glob("*.npz"):
        kept.write_text("{")
    assert len(hvdtrain.open_webdataset(tmp_path, inputs="png")) == 21


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: write_tar(path, range(3), mode="w:gz"), "uncompressed tar"),
        (lambda path: path.write_bytes(write_tar(path, range(9)).read_bytes()[:5000]), "uncompressed tar"),
        (lambda path: path.write_bytes(_with_damage(write_tar(path, range(9)))), "uncompressed tar"),
        (lambda path: path.write_bytes(write_tar(path, range(9)).read_bytes()[:3072]), "uncompressed tar"),
        (lambda path: write_tar(path, [1, 1]), "two files .png"),
        (lambda path: write_tar(path, [1], pkl=lambda _: b"x"), "pickles are not loaded"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, make, message):
    make(tmp_path / "t.tar")
    with pytest.raises(DataError, match=message):
        hvdtrain.open_webdataset(tmp_path / "t.tar")


def _with_damage(path):
    data = bytearray(path.read_bytes())
    data[3072:3172] = b"x" * 100  # the name in a header in the midst
    return bytes(data)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_tar_without_an_index_that_is_cut_is_told(tmp_path, mode, share):
    data = write_tar(tmp_path / "t.tar", range(200), mode=mode).read_bytes()
    assert len(list(tar_samples(str(tmp_path / "t.tar"), decodes=True))) == 200
    (tmp_path / "t.tar").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DataError, match=r"t\.tar cannot be read as a tar"):
        list(tar_samples(str(tmp_path / "t.tar"), decodes=True))


def test_a_tar_without_an_index_that_is_damaged_is_told(tmp_path):
    path = write_tar(tmp_path / "t.tar", range(20))
    whole = path.read_bytes()
    for damaged in (whole[:3072], _with_damage(path)):  # cut at a header, and a header that is none
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="no header at byte 3,072"):
            list(tar_samples(str(path), decodes=True))
    with pytest.raises(DataError, match=r"sample set/s00001 has two files \.png"):
        list(tar_samples(str(write_tar(path, [1, 1])), decodes=True))
