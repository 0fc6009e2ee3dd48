"""Files of weights that somebody else made: what they take of memory is checked before they are read."""

import lzma
import mmap
import re
import struct
import zipfile
import zlib
from pathlib import Path

from hvdtrain.errors import CheckpointError
from hvdtrain.storage.files import open_regular

# what zipfile raises for archives that are damaged, encrypted or packed in a way that it does not know
ZIP_ERRORS: tuple[type[Exception], ...] = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(KeyError, ValueError, EOFError, OSError, RuntimeError, OverflowError),
)
# PyTorch's reader of pickles calls bytearray, which a number of five bytes makes as large as it says
_BYTEARRAY = re.compile(rb"c(__builtin__|builtins)\nbytearray\n")


def check_torch_file(path: Path) -> None:
    """Check that a file which PyTorch saved takes no more memory than its size says.

    Raises:
        CheckpointError: If its parts are compressed or overlap, which PyTorch does not write, or if it
            names ``bytearray``.
        OSError: If it cannot be read.
    """
    remedy = (
        "If you trust it, read it yourself and save the weights alone: torch.save(model.state_dict(), PATH)."
    )
    with open_regular(path) as file:
        if zipfile.is_zipfile(file):
            size = path.stat().st_size
            with zipfile.ZipFile(file) as archive:
                parts = archive.infolist()
            unpacked = sum(part.file_size for part in parts)
            if unpacked > size or any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise CheckpointError(
                    f"{path} has {size:,} bytes and unpacks to {unpacked:,}; "
                    "PyTorch does not compress its files",
                    remedy,
                )
        if not path.stat().st_size:
            return  # which PyTorch refuses
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if _BYTEARRAY.search(content):
                raise CheckpointError(
                    f"{path} is refused: it has a bytearray, whose size is not checked", remedy
                )
