"""Files of predictions: rows as they were added, in shapes as they were."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from hvdtrain.jobs.serving import prediction_files
from hvdtrain.jobs.serving.prediction_files import FORMATS

SHAPES = {"one": (), "row": (3,), "grid": (2, 4), "none": (0,)}


def rows(first, last, dtype="float32"):
    count = last - first
    return {
        name: (np.arange(count * int(np.prod(shape))) + first).reshape(count, *shape).astype(dtype)
        for name, shape in SHAPES.items()
    }


def written(path, *parts):
    file = FORMATS[path.suffix](path, sum(len(part["one"]) for part in parts))
    for part in parts:
        file.add(part)
    file.finish()
    assert [other.name for other in path.parent.iterdir()] == [path.name]


def read(path):
    if path.suffix == ".npz":
        return dict(np.load(path))
    table = pq.read_table(path)
    return {name: np.array(table[name].to_pylist(), np.float32) for name in table.column_names}


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_rows_are_as_they_were_added(suffix, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(prediction_files, "_GROUP_BYTES", 100)
    parts = [rows(0, 5, dtype), rows(5, 6, dtype), rows(6, 10, dtype)]
    written(tmp_path / f"x{suffix}", *parts)
    found = read(tmp_path / f"x{suffix}")
    assert list(found) == list(SHAPES)
    for name, array in found.items():
        np.testing.assert_array_equal(array, np.concatenate([part[name] for part in parts]))
    if suffix == ".npz":
        assert {array.dtype for array in found.values()} == {np.dtype(dtype)}
