"""The source archive and the cache of wheels."""

import os
from pathlib import Path

import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import cache as source
from hvdtrain.horovod_build.cache import BuildCache


def test_another_archive_is_refused(tmp_path):
    archive = tmp_path / source.SDIST
    archive.write_bytes(b"not Horovod")
    with pytest.raises(HorovodBuildError, match="sha256"):
        source.unpack(archive, tmp_path)


def test_a_damaged_archive_in_the_cache_is_downloaded_again(tmp_path, monkeypatch):
    cache = BuildCache(tmp_path)
    (cache.archives / source.SDIST).write_bytes(b"dama")
    monkeypatch.setattr(source, "_download", lambda folder: (folder / source.SDIST).write_bytes(b"whole"))
    monkeypatch.setattr(
        source, "SDIST_SHA256", "7cc8d28c9bfeab8c9e8a1aeaf2d0c1f0a9c6bb5e6ba87e0ff1ff2f8dfa0ba1ef"
    )
    with pytest.raises(HorovodBuildError):
        source.fetch_source(cache)
    monkeypatch.setattr(source, "SDIST_SHA256", source.sha256_of(written(tmp_path / "whole", b"whole")))
    assert source.fetch_source(cache).read_bytes() == b"whole"


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_stored_wheel_is_found_by_its_key_and_name(cache, wheel):
    assert cache.wheel("key") is None
    stored = cache.store("key", wheel)
    assert cache.wheel("key") == stored
    assert (stored.name, stored.read_bytes()) == (wheel.name, b"a wheel")
    assert cache.wheel("other") is None


@pytest.mark.parametrize(
    "harm",
    [
        lambda wheel: wheel.write_bytes(b"a wh"),
        lambda wheel: wheel.unlink(),
        lambda wheel: (wheel.parent / "wheel.json").unlink(),
        lambda wheel: (wheel.parent / "wheel.json").write_text('{"name": '),
        lambda wheel: (wheel.parent / "wheel.json").write_text("[]"),
    ],
    ids=["short", "gone", "no record", "half a record", "another record"],
)
def test_a_damaged_wheel_is_not_taken(cache, wheel, harm):
    harm(cache.store("key", wheel))
    assert cache.wheel("key") is None


def test_a_wheel_that_others_can_change_is_not_taken(cache, wheel):
    before = os.umask(0)
    try:
        stored = cache.store("key", wheel)
    finally:
        os.umask(before)
    assert cache.wheel("key") == stored
    stored.chmod(0o666)
    assert cache.wheel("key") is None
