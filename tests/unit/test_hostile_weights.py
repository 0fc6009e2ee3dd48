"""Files of weights that take more memory than they have bytes are refused before they are read."""

import shutil
import zipfile

import pytest

torch = pytest.importorskip("torch")

from hvdtrain.backends.torch.export import _read_weights  # noqa: E402 - needs torch
from hvdtrain.errors import CheckpointError  # noqa: E402


class ByteArray:
    """Pickled, it is a call of bytearray."""

    def __reduce__(self):
        return bytearray, (1 << 40,)


def test_a_file_that_unpacks_to_more_is_refused(tmp_path):
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "good.pt")
    with (
        zipfile.ZipFile(tmp_path / "good.pt") as good,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for part in good.infolist():
            bomb.writestr(part.filename, good.read(part))
    with pytest.raises(CheckpointError, match=r"bytes and unpacks to 4,19.*; PyTorch does not compress"):
        _read_weights(tmp_path / "bomb.pt")
    assert _read_weights(tmp_path / "good.pt")["w"].shape == (1 << 20,)


def test_parts_that_share_their_bytes_are_refused(tmp_path):
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "bomb.pt")
    with zipfile.ZipFile(tmp_path / "bomb.pt", "a") as archive:
        part = max(archive.infolist(), key=lambda part: part.file_size)
        archive.filelist += [part] * 20
        archive.writestr("more", "")  # so that the list is written anew
    with pytest.raises(CheckpointError, match="unpacks to 88,"):
        _read_weights(tmp_path / "bomb.pt")


@pytest.mark.parametrize("is_archive", [True, False])
def test_a_bytearray_of_a_terabyte_is_refused(tmp_path, is_archive):
    path = tmp_path / "bomb.pt"
    torch.save({"b": ByteArray()}, path, _use_new_zipfile_serialization=is_archive)
    with pytest.raises(CheckpointError, match=r"bomb\.pt is refused: it has a bytearray"):
        _read_weights(path)


@pytest.mark.parametrize("is_archive", [True, False])
def test_what_pytorch_saves_is_read(tmp_path, is_archive):
    path, layer = tmp_path / "good.pt", torch.nn.Linear(3, 2)
    state = {"model": layer.state_dict(), "args": {"lr": 0.1, "names": {"a", "b"}}}
    torch.save(state, path, _use_new_zipfile_serialization=is_archive)
    assert _read_weights(path)["model"]["weight"].shape == (2, 3)
    shutil.copy(path, tmp_path / "other name.pth")
    assert _read_weights(tmp_path / "other name.pth").keys() == state.keys()
