"""Tars that end where they say: Python's own reader takes a damaged or missing header for their end."""

import tarfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

from hvdtrain.data.decoding import decode_file
from hvdtrain.data.shard_files import open_file
from hvdtrain.errors import DataError


class _Member(tarfile.TarInfo):
    """A member whose header is whole."""

    @classmethod
    def fromtarfile(cls, tar: Any) -> Any:
        """Return the next member.

        Raises:
            ReadError: If its header is damaged, or the file ends without the mark of a tar's end.
        """
        at = tar.offset
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise  # the mark of the end; tarfile takes every other one for the end, too
            raise tarfile.ReadError(f"no header at byte {at:,}: {error}") from None


def open_tar(file: BinaryIO, mode: Literal["r:", "r|*"]) -> tarfile.TarFile:
    """Return a tar that is read to its end, or raises a TarError there."""
    return tarfile.open(fileobj=file, mode=mode, tarinfo=_Member)


def key_and_kind(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Return to which sample a member belongs and its kind; None if it is no file of a sample.

    As webdataset has it, a sample's files have a name in common, and their kind follows its first dot.
    """
    folder, slash, base = member.name.rpartition("/")
    stem, dot, kind = base.partition(".")
    if not member.isreg() or not dot or not stem:
        return None
    return f"{folder}{slash}{stem}", kind.lower()


def tar_samples(path: str, decodes: bool) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar, which may be compressed, as it is read.

    Raises:
        DataError: If it is damaged or cut, or a sample has two files of one kind.
    """
    key, record = "", dict[str, Any]()
    try:
        with open_file(path) as file, open_tar(file, "r|*") as tar:
            for member in tar:
                if (found := key_and_kind(member)) is None:
                    continue
                if found[0] != key:
                    if record:
                        yield {"__key__": key, **record}
                    key, record = found[0], {}
                kind, where = found[1], f"sample {key} of {path}"
                if kind in record:
                    raise DataError(f"{path}: sample {key} has two files .{kind}")
                content = tar.extractfile(member)
                assert content is not None  # it is a regular file
                data = content.read()
                record[kind] = decode_file(kind, data, where) if decodes else data
                tar.members.clear()  # type: ignore[attr-defined]  # it keeps every header otherwise
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as a tar: {error}") from error
    if record:
        yield {"__key__": key, **record}
