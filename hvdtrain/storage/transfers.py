"""Files to and from object stores by fsspec's own transfers: whole or not there."""

import random
import time
from pathlib import Path
from uuid import uuid4

from hvdtrain.storage.urls import (
    ChangedObjectError,
    MissingBucketError,
    MissingObjectError,
    StoreError,
    info,
    read,
    read_version,
    request,
    shown,
    write,
)

_MAX_BYTES = 1 << 28  # of an object with lines
_TRIES, _WAIT_SECONDS = 20, 0.2  # while others append lines at the same time


def download(url: str, path: Path) -> None:
    """Download an object to a file, which takes its name when it is whole.

    Args:
        url: the object.
        path: the file, in a folder that exists; one of that name is replaced.

    Raises:
        MissingObjectError: If there is no such object.
        OSError: If it cannot be read, or the file not be written.
    """
    from fsspec.callbacks import Callback

    if info(url).is_folder:
        raise MissingObjectError(f"{shown(url)} is a folder, not an object")
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        request(url, "read", "get_file", str(partial), callback=Callback())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def upload(path: Path, url: str) -> None:
    """Upload a file, and check how many bytes the store has then; an object of that name is replaced.

    Raises:
        ChangedObjectError: If the store has another number of bytes.
        StoreError: If it cannot be written.
        OSError: If the file cannot be read.
    """
    from fsspec.callbacks import Callback

    size_bytes = path.stat().st_size
    request(url, "written", "put_file", str(path), callback=Callback())
    if (found_bytes := info(url).size_bytes) < size_bytes:  # a log may have grown meanwhile
        raise ChangedObjectError(f"{shown(url)} has {found_bytes:,} bytes of {size_bytes:,}")


def append_line(url: str, line: bytes) -> None:
    """Append a line to an object, which is written anew with one more line.

    S3 refuses that if another process has written the object since it was read; then it is read again. With
    other stores, and servers that do not know the condition, the line of a process that writes in the same
    moment may be lost.

    Raises:
        StoreError: If it cannot be read or written.
    """
    for number in range(_TRIES):
        try:
            before, tag = read_version(url, _MAX_BYTES)
        except MissingBucketError:
            raise
        except MissingObjectError:
            before, tag = b"", ""
        if number and line in before:  # it was written, and the answer was lost
            return
        try:
            write(url, before + line, over=tag)
        except (ChangedObjectError, MissingObjectError):
            time.sleep(random.uniform(0.0, _WAIT_SECONDS * (number + 1)))
            continue
        if line in read(url, _MAX_BYTES):
            return
    raise StoreError(f"{shown(url)} cannot be written: other processes write it, too")
