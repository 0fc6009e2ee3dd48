"""MDS shards: what is written as the format says is read, raw and with zstd; damaged shards are refused."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image
from support.stream_files import write_mds

import hvdtrain
from hvdtrain.data.datasets import fetch
from hvdtrain.errors import BadSampleError, DataError


def png(value):
    file = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


COLUMNS = [  # name, encoding, fixed size or None, and the bytes of a sample's value
    ("image", "png", None, png),
    ("label", "int", 8, lambda n: np.int64(n).tobytes()),
    ("text", "str", None, lambda n: f"number {n}".encode()),
    ("fixed", "ndarray:float32:2,3", 24, lambda n: np.full((2, 3), n, "<f4").tobytes()),
    ("shaped", "ndarray:int16", None, lambda n: bytes([(2 << 2) | 0, 1, 4]) + np.full(4, n, "<i2").tobytes()),
    ("free", "ndarray", None, lambda n: bytes([65, (1 << 2) | 1, 3, 0]) + np.full(3, n, "<i8").tobytes()),
    ("small", "uint8", 1, lambda n: bytes([n])),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mds"


def write(folder, parts=(range(7), range(7, 7), range(7, 20)), compression=None, columns=COLUMNS, **changes):
    return write_mds(folder, parts, columns, compression, **changes)


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7"])
def test_samples_are_those_that_were_written(tmp_path, compression):
    data = hvdtrain.open_mds(write(tmp_path / "d", compression=compression), inputs="image", targets="label")
    assert len(data) == 20
    assert data.notes == ("the column text is left out: not numbers",)
    found = fetch(data, np.asarray([19, 0, 6, 7]))
    assert found["targets"].tolist() == [19, 0, 6, 7]
    assert found["inputs"].shape == (4, 4, 5, 3)
    assert found["inputs"][:, 0, 0, 0].tolist() == [19, 0, 6, 7]
    assert found["fixed"].shape == (4, 2, 3)
    assert found["fixed"][0, 1, 1] == 19
    assert found["shaped"][2].tolist() == [[6, 6, 6, 6]]
    assert found["free"].tolist()[3] == [7, 7, 7]
    assert found["small"].tolist() == [19, 0, 6, 7]
    assert pickle.loads(pickle.dumps(data))[11]["targets"] == 11


def test_a_compressed_shard_is_decompressed_once(tmp_path, cache):
    write(tmp_path / "d", compression="zstd")
    hvdtrain.open_mds(tmp_path / "d", inputs="image")
    times = {path: path.stat().st_mtime_ns for path in cache.glob("*.mds")}
    assert len(times) == 2
    hvdtrain.open_mds(tmp_path / "d", inputs="image")
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.mds")} == times
    assert {path.suffix for path in cache.iterdir()} == {".mds", ".lock"}


def test_decode_has_the_record(tmp_path):
    data = hvdtrain.open_mds(write(tmp_path / "d"), decode=lambda r: {"n": int(r["text"].split()[1])})
    assert data[13]["n"] == 13


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "json"}, "has the format 'json'; MDS is read"),
        ({"compression": "gz"}, "compressed with gz"),
        ({"raw_data": {"basename": "../x.mds", "bytes": 9}}, "names a file outside its folder"),
        ({"compression": "zstd", "zip_data": {"basename": "../x.zstd"}}, "names a file outside its folder"),
        ({"compression": "zstd", "zip_data": None}, "cannot be read as the index"),
        ({"column_encodings": ["pkl"] * 7}, "pickles are not loaded"),
        ({"column_encodings": ["xyz"] * 7}, "'xyz': unknown"),
        ({"samples": None}, "cannot be read as the index"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        hvdtrain.open_mds(write(tmp_path / "d", **changes))


def test_damaged_shards_are_found(tmp_path):
    folder = write(tmp_path / "d", compression="zstd")
    packed = folder / "shard.00000.mds.zstd"
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"shard\.00000\.mds\.zstd"):
        hvdtrain.open_mds(folder)
    data = hvdtrain.open_mds(write(tmp_path / "e"), inputs="image", targets="label")
    path = tmp_path / "e" / "shard.00002.mds"
    whole = bytearray(path.read_bytes())
    path.write_bytes(bytes(whole[:-100]))
    with pytest.raises(DataError, match="ends before byte"):
        data[19]
    with pytest.raises(DataError, match=r"shard\.00002\.mds has .* bytes; its index says"):
        hvdtrain.open_mds(tmp_path / "e")
    whole[8:12] = np.uint32(2**31).tobytes()  # where the second sample begins
    path.write_bytes(bytes(whole))
    with pytest.raises(DataError, match="is not in the shard"):
        data[8]
    path.unlink()
    with pytest.raises(DataError, match=r"shard\.00002\.mds cannot be read"):
        hvdtrain.open_mds(tmp_path / "e")
    broken = write(tmp_path / "f", columns=[("image", "png", None, lambda n: b"no" if n == 3 else png(n))])
    with pytest.raises(BadSampleError, match=r"sample 3 of .* image cannot be decoded"):
        hvdtrain.open_mds(broken, inputs="image")[3]
