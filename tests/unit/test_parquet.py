"""Parquet by row group: the rows that were written, in a bounded number of decoded row groups."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hvdtrain
from hvdtrain.data.datasets import fetch
from hvdtrain.data.fingerprint import first_difference, take_fingerprint
from hvdtrain.data.order import ordering_of
from hvdtrain.errors import DataError
from hvdtrain.jobs.opening.data_identity import JobData, is_changed

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402


def write(folder, parts=((0, 25), (25, 40)), rows=10, **columns):
    for number, (first, end) in enumerate(parts):
        values = np.arange(first, end)
        table = {
            "x": list(np.stack([values, values + 0.5], 1).astype(np.float32)),
            "grid": [[[float(v), 1.0], [2.0, 3.0]] for v in values],
            "y": values,
            "name": [f"row {v}" for v in values],
            **{name: make(values) for name, make in columns.items()},
        }
        pq.write_table(pa.table(table), folder / f"part-{number}.parquet", row_group_size=rows)
    return folder


def test_rows_are_those_that_were_written(tmp_path):
    data = hvdtrain.open_parquet(write(tmp_path), inputs="x", targets="y")
    assert len(data) == 40
    assert data.notes == ("the column name is left out: not numbers",)
    found = fetch(data, np.asarray([39, 0, 24, 25, 9, 10]))
    assert found["targets"].tolist() == [39, 0, 24, 25, 9, 10]
    assert found["inputs"][:, 1].tolist() == [39.5, 0.5, 24.5, 25.5, 9.5, 10.5]
    assert found["grid"][0].tolist() == [[39, 1], [2, 3]]
    assert ordering_of(data).sizes == (10, 10, 5, 10, 5)
    assert data[7]["targets"] == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: write(f, gap=lambda v: [None, *map(float, v[1:])]), "'gap' in row group 0 .* 1 missing"),
        (lambda f: (write(f) / "part-1.parquet").write_bytes(b"PAR1 no"), "damaged or no Parquet file"),
        (lambda f: pq.write_table(pa.table({"x": [1]}), write(f) / "part-2.parquet"), "has the columns x"),
        (lambda f: None, "there are no .parquet files"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, change, message):
    change(tmp_path)
    with pytest.raises(DataError, match=message):
        hvdtrain.open_parquet(tmp_path)


def opened(folder):
    """Return a data set that has decoded no row group yet."""
    return hvdtrain.open_parquet(folder, targets="y", columns=["y"], decode=lambda row: row, shuffle_blocks=2)


def test_threads_decode_different_row_groups_at_the_same_time_and_each_once(tmp_path, monkeypatch):
    data = opened(write(tmp_path))
    decoded, both, decode = [], threading.Barrier(2), data._decoded

    def meet(number):
        decoded.append(number)
        both.wait(60)
        return decode(number)

    monkeypatch.setattr(data, "_decoded", meet)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda index: data[index]["targets"], [0, 10, 1, 11]))
    assert found == [0, 10, 1, 11]
    assert sorted(decoded) == [0, 1]


def test_a_row_group_that_could_not_be_read_is_tried_again(tmp_path):
    paths = sorted(write(tmp_path).iterdir())
    data = opened(tmp_path)
    content = paths[0].read_bytes()
    paths[0].write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"row group 0 .* cannot be read"):
        data[0]
    paths[0].write_bytes(content)
    assert data[3]["targets"] == 3


def test_a_resume_with_other_row_groups_is_a_change(tmp_path):
    def taken(folder):
        return take_fingerprint(hvdtrain.open_parquet(folder, inputs="x", targets="y"))

    before, same, other = taken(write(tmp_path)), taken(tmp_path), taken(write(tmp_path, rows=5))
    assert before == same
    assert first_difference(before, other) is None
    assert before.order != other.order
    assert is_changed({"train_data": before}, JobData({}, {"train_data": other}))
