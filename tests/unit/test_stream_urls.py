"""Data in an object store: a URL of fsspec in place of a path, in memory and in S3."""

import sys

import numpy as np
import pytest
from support.object_store import client_environment, object_store
from support.stream_files import sample, write_samples

import hvdtrain
from hvdtrain.data.datasets import as_dataset, fetch
from hvdtrain.data.order import BatchPlan
from hvdtrain.data.stream_feed import StreamPart, feed_of
from hvdtrain.errors import DataError
from hvdtrain.storage import urls as object_urls

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")
pytest.importorskip("s3fs")
pytest.importorskip("moto")

SIZE = 30
PARTS = [range(11), range(11, 12), range(12, SIZE)]


@pytest.fixture(scope="module", params=["memory", "s3"])
def place(request):
    """Return the URL of a folder; its threads are there before those of tests are counted."""
    if request.param == "memory":
        yield "memory://data"
    else:
        with object_store() as store, client_environment(store):
            object_urls.entries(store.url("nothing"))
            yield store.url("data")


@pytest.fixture
def url(place, tmp_path):
    """Return the URL of a folder that has the samples in all formats."""
    write_samples(tmp_path, PARTS)
    system, folder = fsspec.core.url_to_fs(place)
    for path in tmp_path.rglob("*.*"):
        system.pipe(f"{folder}/{path.relative_to(tmp_path)}", path.read_bytes())
    return place


def check(arrays, numbers):
    for name in ("inputs", "targets"):
        np.testing.assert_array_equal(arrays[name], [sample(number)[name] for number in numbers])


def test_parquet(url):
    order = np.random.default_rng(0).permutation(SIZE)
    for paths in (f"{url}/part-*.parquet", f"{url}/part-{{0..2}}.parquet", url):
        data = as_dataset(hvdtrain.open_parquet(paths, inputs="x", targets="y"))
        assert len(data) == SIZE
        check(fetch(data, order), order)


def test_tars(url):
    data = hvdtrain.stream(f"{url}/part-*.tar", inputs="x.npy", targets="y.npy", length=SIZE)
    assert data.source.shards == 3
    with feed_of(StreamPart(data, BatchPlan(SIZE, 1), 0), None) as feed:
        (batch,) = feed
    check({name: array[0] for name, array in batch.arrays.items()}, range(SIZE))


def test_what_is_not_there_is_refused(url):
    with pytest.raises(DataError, match="nowhere"):
        hvdtrain.open_parquet(f"{url}/nowhere")
    with pytest.raises(DataError, match="nowhere"):
        hvdtrain.stream(f"{url}/nowhere/*.tar")


def test_a_package_of_a_store_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(DataError) as refused:
        hvdtrain.open_parquet("gs://bucket/data", inputs="x", targets="n")
    assert refused.value.remedy == "pip install gcsfs"
