"""What object stores say of their objects, as fsspec hands it on."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True)
class ObjectInfo:
    """What a store says of an object or of a folder.

    Attributes:
        url: its URL.
        size_bytes: its size; 0 of a folder.
        is_folder: whether it is a folder: what has objects below its name.
        version: a text that changes when the object does.
        tag: the store's own name of this version of an object; empty if it has none.
        modified: when it was written, by the store's clock; None if the store does not say.
    """

    url: str
    size_bytes: int
    is_folder: bool
    version: str
    tag: str
    modified: datetime | None


def info_of(url: str, found: dict[str, Any]) -> ObjectInfo:
    """Return what an entry of fsspec says of the object at a URL."""
    is_folder = found.get("type") == "directory"
    times = (found.get(key) for key in ("LastModified", "last_modified", "updated", "mtime", "created"))
    modified = next((_as_time(one) for one in times if one), None)
    tags = (found.get(key) for key in ("ETag", "etag", "generation"))
    tag = next((str(one) for one in tags if one), "")
    size = 0 if is_folder else int(found.get("size") or 0)
    return ObjectInfo(url, size, is_folder, f"{size} {tag or modified}", tag, modified)


def _as_time(value: Any) -> datetime | None:
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    return value.replace(tzinfo=value.tzinfo or UTC) if isinstance(value, datetime) else None
