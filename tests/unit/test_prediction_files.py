"""Files of predictions: rows as they were added, in shapes as they were."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hvdtrain.errors import EnvironmentFault, TaskError, UsageError
from hvdtrain.jobs.serving import prediction_files
from hvdtrain.jobs.serving.prediction_files import check_suffix, prediction_file

SHAPES = {"one": (), "row": (3,), "grid": (2, 4), "none": (0,)}


def rows(first, last, dtype="float32"):
    count = last - first
    return {
        name: (np.arange(count * int(np.prod(shape))) + first).reshape(count, *shape).astype(dtype)
        for name, shape in SHAPES.items()
    }


def written(path, *parts):
    file = prediction_file(path, sum(len(part["one"]) for part in parts))
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


def test_an_archive_refuses_another_shape(tmp_path):
    file = prediction_file(tmp_path / "x.npz", 4)
    file.add({"x": np.zeros((2, 3))})
    with pytest.raises(TaskError, match=r"'x' has shape \(5,\) for sample 2 and \(3,\) for those before"):
        file.add({"x": np.zeros((2, 5))})


def test_a_table_takes_lists_of_any_length(tmp_path):
    path = tmp_path / "x.parquet"
    written(path, {"one": np.zeros((2, 3))}, {"one": np.zeros((1, 5))})
    assert [len(row) for row in pq.read_table(path)["one"].to_pylist()] == [3, 3, 5]


def test_the_ending_is_that_of_a_format(monkeypatch):
    with pytest.raises(UsageError, match=r"x\.csv: predictions .* end with \.npz or \.parquet"):
        check_suffix(Path("x.csv"))
    check_suffix(Path("x.npz"))
    monkeypatch.setattr(prediction_files.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentFault, match="needs pyarrow"):
        check_suffix(Path("x.parquet"))
