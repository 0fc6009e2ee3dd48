"""The source archive and the cache of wheels."""

import hashlib
import os
import zipfile
import zlib

import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import cache as source
from hvdtrain.horovod_build.cache import exposure


def test_another_archive_is_downloaded_again_and_refused(cache, tmp_path, monkeypatch):
    kept = cache.folder / "source" / source.SDIST
    kept.write_bytes(b"damaged")
    with pytest.raises(HorovodBuildError, match="sha256"):
        source.unpack(kept, tmp_path)
    monkeypatch.setattr(source, "_download", lambda folder: (folder / source.SDIST).write_bytes(b"whole"))
    monkeypatch.setattr(source, "SDIST_SHA256", hashlib.sha256(b"whole").hexdigest())
    assert source.fetch_source(cache).read_bytes() == b"whole"


def test_a_stored_wheel_is_found_by_its_key_and_name_while_it_is_whole(cache, wheel):
    assert cache.wheel("key") is None
    stored = cache.store("key", wheel)
    assert cache.wheel("key") == stored
    assert (stored.name, stored.read_bytes()) == (wheel.name, wheel.read_bytes())
    assert cache.wheel("other") is None
    stored.write_bytes(wheel.read_bytes().replace(b"a module", b"A module"))
    assert cache.wheel("key") is None
    with zipfile.ZipFile(stored, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a", "what is compressed")
    compressed = zlib.compress(b"what is compressed", wbits=-15)
    stored.write_bytes(stored.read_bytes().replace(compressed, b"\xff" * len(compressed)))
    assert cache.wheel("key") is None
    stored.write_bytes(b"PK")
    assert cache.wheel("key") is None


@pytest.mark.parametrize(
    ("owner", "mode", "said"),
    [
        (os.geteuid(), 0o755, ""),
        (os.geteuid(), 0o775, "can be written by others"),
        (os.geteuid(), 0o757, "can be written by others"),
        (1003, 0o700, "belongs to user 1003"),
    ],
)
def test_a_cache_is_its_users_alone(tmp_path, owner, mode, said):
    if os.geteuid() and owner == 1003:
        pytest.skip("root alone gives files away")
    os.chown(tmp_path, owner, -1)
    tmp_path.chmod(mode)
    assert exposure(tmp_path, tmp_path / "none") == (f"{tmp_path} {said}" if said else "")
