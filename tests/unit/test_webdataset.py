"""Tars of WebDataset: the samples that were written; cut and damaged tars are refused."""

import io

import numpy as np
import pytest
from PIL import Image
from support import stream_files

import hvdtrain
from hvdtrain.data.webdataset import tar_samples
from hvdtrain.errors import DataError


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_tar(path, numbers, mode="w", **more):
    samples = [(one, {"png": png(one), "cls": b"%d" % one, "json": b'{"a": 1}', **more}) for one in numbers]
    return stream_files.write_tar(path, samples, mode)


def read(path, decodes=True):
    return list(tar_samples(str(path), decodes))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_samples_are_those_that_were_written_and_a_cut_tar_is_an_error(tmp_path, mode):
    path = write_tar(tmp_path / "t.tar", range(200), mode=mode)
    found = read(path)
    assert [record["cls"] for record in found] == list(range(200))
    assert found[7]["png"].shape == (4, 5, 3)
    assert (found[7]["png"] == 7).all()
    assert read(path, decodes=False)[3]["cls"] == b"3"
    data = path.read_bytes()
    for share in (0.3, 0.6, 0.95):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(DataError, match=r"t\.tar cannot be read as a tar"):
            read(path)


def test_a_tar_that_is_damaged_is_an_error(tmp_path):
    path = write_tar(tmp_path / "t.tar", range(20))
    whole = path.read_bytes()
    # cut at a header, and a header that is none
    for damaged in (whole[:3072], whole[:3072] + b"x" * 100 + whole[3172:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="no header at byte 3,072"):
            read(path)
    with pytest.raises(DataError, match=r"sample set/s00001 has two files \.png"):
        read(write_tar(path, [1, 1]))
    with pytest.raises(DataError, match="pickles are not loaded"):
        read(write_tar(path, [1], pkl=b"x"))


def test_the_data_set_that_left_names_the_stream():
    with pytest.raises(AttributeError, match=r"hvdtrain\.stream"):
        hvdtrain.open_webdataset("t.tar")
