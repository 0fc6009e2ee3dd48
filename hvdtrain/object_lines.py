"""Lines that several processes append to one object, though stores have no way to append."""

import random
import time

from hvdtrain.storage.urls import (
    PATIENCE,
    ChangedObjectError,
    ExistingObjectError,
    MissingBucketError,
    MissingObjectError,
    StoreError,
    code_of,
    info,
    is_s3,
    read,
    request,
    shown,
    write,
)

_MAX_BYTES = 1 << 28  # of the object
_TRIES = 20  # while others append lines at the same time
_WAIT_SECONDS = 0.2
_NOT_KNOWN = ("NotImplemented", "501")  # answers of servers that do not know the condition


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
            tag, before = info(url).tag, read(url, _MAX_BYTES)
        except MissingBucketError:
            raise
        except MissingObjectError:
            tag, before = "", b""
        if number and line in before:  # it was written, and the answer was lost
            return
        try:
            _write_over(url, tag, before + line)
        except (ChangedObjectError, ExistingObjectError, MissingObjectError):
            time.sleep(random.uniform(0.0, _WAIT_SECONDS * (number + 1)))
            continue
        if line in read(url, _MAX_BYTES):
            return
    raise StoreError(f"{shown(url)} cannot be written: other processes write it, too")


def _write_over(url: str, tag: str, content: bytes) -> None:
    """Write an object if it is still what it was.

    Args:
        url: the object.
        tag: the tag of the version that it takes the place of; empty if there was none.
        content: what to write.

    Raises:
        ChangedObjectError: If there is another version now.
        ExistingObjectError: If there is one now, and was none.
        MissingObjectError: If there is none now, and was one.
        StoreError: If it cannot be written.
    """
    condition = {"IfMatch": tag} if tag else {"IfNoneMatch": "*"}
    if is_s3(url):
        try:
            request(url, "written", PATIENCE, "pipe_file", content, **condition)
            return
        except StoreError as error:
            if code_of(error) not in _NOT_KNOWN:
                raise
    write(url, content)
