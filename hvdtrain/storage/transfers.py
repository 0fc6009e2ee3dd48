"""Files to and from object stores: streamed in blocks, checked, and whole or not there."""

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast
from uuid import uuid4

from hvdtrain.storage.urls import (
    BLOCK_BYTES,
    PATIENCE,
    ChangedObjectError,
    ExistingObjectError,
    MissingBucketError,
    MissingObjectError,
    Patience,
    StoreError,
    info,
    is_s3,
    read,
    read_version,
    request,
    shown,
    write,
)
from hvdtrain.workers.activity import ACTIVITY

_MAX_BYTES = 1 << 28  # of the object
_TRIES = 20  # while others append lines at the same time
_WAIT_SECONDS = 0.2


def append_line(url: str, line: bytes) -> None:
    """Append a line to an object, which is written anew with one more line.

    S3 is asked to refuse that if another process has written the object since it was read; then it is read
    again. With other stores, and servers that do not know the condition, the line of a process that writes in
    the same moment may be lost.

    Raises:
        StoreError: If it cannot be read or written.
    """
    for number in range(_TRIES):
        try:
            before, tag = read_version(url, _MAX_BYTES)
        except MissingBucketError:
            raise
        except MissingObjectError:
            tag, before = "", b""
        if number and line in before:  # it was written, and the answer was lost
            return
        try:
            write(url, before + line, over=tag)
        except (ChangedObjectError, ExistingObjectError, MissingObjectError):
            time.sleep(random.uniform(0.0, _WAIT_SECONDS * (number + 1)))
            continue
        if line in read(url, _MAX_BYTES):
            return
    raise StoreError(f"{shown(url)} cannot be written: other processes write it, too")


_MOST_PARTS = 9_000  # S3 takes 10,000
_PARTS_AT_ONCE = 4


def download(url: str, path: Path, *, sha256: str | None = None, patience: Patience = PATIENCE) -> None:
    """Download an object to a file, which takes its name when it is whole and on the disk.

    Args:
        url: the object.
        path: the file, in a folder that exists; one of that name is replaced.
        sha256: what the content must have; None checks only that it was not changed meanwhile.
        patience: how long each request may take.

    Raises:
        MissingObjectError: If there is no such object.
        ChangedObjectError: If it is not what it must be.
        OSError: If it cannot be read, or the file not be written.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        _twice(lambda: _download(url, partial, sha256, patience))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def upload(path: Path, url: str, *, sha256: str | None = None, patience: Patience = PATIENCE) -> None:
    """Upload a file that does not change meanwhile, and check what the store has then.

    Args:
        path: the file.
        url: the object; one of that name is replaced.
        sha256: of the file; the object is then read back and compared. None compares the sizes only.
        patience: how long each request may take.

    Raises:
        ChangedObjectError: If the store has something else than the file.
        StoreError: If it cannot be written.
        OSError: If the file cannot be read.
    """
    size_bytes = path.stat().st_size
    _twice(lambda: _upload(path, url, size_bytes, sha256, patience))


def digest(url: str, patience: Patience = PATIENCE) -> tuple[str, int]:
    """Return the SHA-256 of an object and how many bytes it has; raises as ``download`` does."""
    found, size_bytes = hashlib.sha256(), info(url, patience).size_bytes
    for block in _blocks(url, size_bytes, patience):
        found.update(block)
    return found.hexdigest(), size_bytes


def _twice(transfer: Callable[[], None]) -> None:
    """Do a transfer, and once more if the object is not what it should be then."""
    try:
        transfer()
    except ChangedObjectError:
        transfer()


def _download(url: str, partial: Path, sha256: str | None, patience: Patience) -> None:
    before = info(url, patience)
    if before.is_folder:
        raise MissingObjectError(f"{shown(url)} is a folder, not an object")
    found = hashlib.sha256()
    with partial.open("wb") as file:
        for block in _blocks(url, before.size_bytes, patience):
            found.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if sha256 is not None:
        if found.hexdigest() != sha256:
            raise ChangedObjectError(f"the content of {shown(url)} is not what it should be")
    elif info(url, patience).version != before.version:
        raise ChangedObjectError(f"{shown(url)} changed while it was read")


def _blocks(url: str, size_bytes: int, patience: Patience) -> Iterator[bytes]:
    for first in range(0, size_bytes, BLOCK_BYTES):
        end = min(first + BLOCK_BYTES, size_bytes)
        yield cast(bytes, request(url, "read", patience, "cat_file", start=first, end=end))
        ACTIVITY.progress()


def _upload(path: Path, url: str, size_bytes: int, sha256: str | None, patience: Patience) -> None:
    from fsspec.callbacks import Callback

    moved = Callback()
    options = {}
    if is_s3(url):
        part_bytes = max(BLOCK_BYTES, -(-size_bytes // _MOST_PARTS))
        options = {"chunksize": part_bytes, "max_concurrency": _PARTS_AT_ONCE}
    request(url, "written", patience, "put_file", str(path), progress=moved, callback=moved, **options)
    found = (None, info(url, patience).size_bytes) if sha256 is None else digest(url, patience)
    if found != (sha256, size_bytes):
        raise ChangedObjectError(
            f"{shown(url)} is not what was uploaded: {found[1]:,} bytes of {size_bytes:,}"
        )
