"""URLs of object stores and of the other file systems of fsspec, and what is read and written there.

Every error is a ``StoreError``, which is an OSError: a store that cannot be reached is to a caller as a disk
that cannot be read. Tries, waits and parts are those of fsspec's clients.
"""

import contextlib
import re
import time
from pathlib import Path
from typing import Any, NamedTuple, cast
from uuid import uuid4

from hvdtrain.workers.activity import ACTIVITY

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):(?!\d+/)\S*@")  # passwords may have a / or an @ in them
TOKEN = re.compile(r"\b((?:https?|s3a?|gs|gcs)://)[^/@\s:?#]+@", re.I)  # others name users and containers so
_SECRETS = re.compile(
    r"([?&][\w.-]*(?:sig|signature|token|credential|secret|key|passw|pwd)[\w.-]*=)[^&\s\"'>]+", re.I
)
_NO_CREDENTIALS = re.compile("(NoCredentials|PartialCredentials|DefaultCredentials)Error|ProfileNotFound")
_S3 = ("s3", "s3a")
_UNMET = ("PreconditionFailed", "412")  # answers to a condition that does not hold
_NOT_KNOWN = {"NotImplemented", "501", "TypeError", "ParamValidationError"}  # of old clients, too
_AZURE = ("az", "abfs")  # adlfs takes conditions for options of its client
READ_ONLY = ("http", "https")
_LOOK_SECONDS = 1.0
STALL_SECONDS = 300.0  # after which a request is given up that moves no bytes, which clients do not notice
_PARTS_AT_ONCE = 4  # of S3; each has 50 MB
_S3_CLIENT = {"connect_timeout": 5, "read_timeout": 30, "retries": {"total_max_attempts": 3}}


class StoreError(OSError):
    """An object cannot be read or written, or the store cannot be reached."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


class MissingObjectError(StoreError, FileNotFoundError):
    """There is no such object or folder, in a bucket that there is."""


class StorePermissionError(StoreError, PermissionError):
    """The store refuses the request, or there are no credentials for it."""


class ChangedObjectError(StoreError):
    """An object is not what it should be, or was written by another process."""


class ObjectInfo(NamedTuple):
    """What a store says of an object or of a folder, which is what has objects below its name."""

    url: str
    size_bytes: int  # 0 of a folder
    is_folder: bool
    tag: str  # the store's own name of this version of an object; empty if it has none

    @classmethod
    def of(cls, url: str, found: dict[str, Any]) -> "ObjectInfo":
        """Return what an entry of fsspec says."""
        is_folder = found.get("type") == "directory"
        tag = next((str(found[key]) for key in ("ETag", "etag", "generation") if found.get(key)), "")
        return cls(url, 0 if is_folder else int(found.get("size") or 0), is_folder, tag)


def is_url(path: object) -> bool:
    """Return whether a path is the URL of an object store or another file system of fsspec."""
    return "://" in str(path)


def shown(url: object) -> str:
    """Return a URL, or a text with URLs in it, without passwords, tokens and signatures."""
    return _SECRETS.sub(r"\1***", TOKEN.sub(r"\1***@", PASSWORD.sub(r"\1:***@", str(url))))


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in small letters, such as "s3"."""
    return url.partition("://")[0].lower()


def join(url: str, *names: str) -> str:
    """Return the URL of what has these names below another one."""
    return "/".join([url.rstrip("/"), *(name.strip("/") for name in names)])


def name(url: str) -> str:
    """Return the last part of a URL."""
    return url.rstrip("/").rpartition("/")[2]


def file_system(url: str, **options: Any) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    package = _PACKAGES.get(scheme_of(url))
    remedy = f"pip install {package}" if package else "Install the package that it needs."
    try:
        from fsspec.core import url_to_fs

        inside = url.partition("://")[2]
        return cast(tuple[Any, str], url_to_fs(f"{scheme_of(url)}://{inside}", **options))
    except ImportError as error:
        raise StoreError(f"{shown(url)} cannot be opened: {error}", remedy) from None
    except Exception as error:  # clients of stores have errors of their own
        raise _named(url, "opened", error) from None


def info(url: str) -> ObjectInfo:
    """Return what the store says of an object or a folder; raises a MissingObjectError if there is none."""
    return ObjectInfo.of(url, request(url, "read", "info"))


def entries(url: str) -> list[ObjectInfo]:
    """Return the objects and folders of a folder, sorted by name; none if there is no such folder."""
    try:
        found = request(url, "listed", "ls", detail=True)
    except MissingObjectError:
        return []
    own = file_system(url, **_options_of(url))[1].strip("/")
    paths = {str(one["name"]).strip("/"): one for one in found}
    inner = sorted(path for path in paths if path.startswith(f"{own}/"))  # not the mark of a folder
    return [ObjectInfo.of(join(url, name(path)), paths[path]) for path in inner]


def objects_below(url: str) -> list[ObjectInfo]:
    """Return all objects in a folder and in its folders; raises as ``entries`` does."""
    found = (objects_below(one.url) if one.is_folder else [one] for one in entries(url))
    return [one for some in found for one in some]


def read(url: str, limit_bytes: int) -> tuple[bytes, str | None]:
    """Return the content of a small object, and the tag of that version or an older one, if it has any."""
    found = info(url)
    content = cast(bytes, request(url, "read", "cat_file")) if found.size_bytes <= limit_bytes else b""
    if max(found.size_bytes, len(content)) > limit_bytes:
        raise ChangedObjectError(f"{shown(url)} has more than the {limit_bytes:,} bytes that are expected")
    return content, found.tag or None


def write(url: str, content: bytes, *, over: str | None = None) -> None:
    """Write a small object over the version with the tag ``over``; "" if there must be none, None for any.

    Only some stores check that while they write, as S3 does; a server that does not know the condition writes
    without it. Raises a ChangedObjectError if there is another version, perhaps its own after a lost answer.
    """
    if over == "" and scheme_of(url) not in _AZURE:
        condition = {"mode": "create"}
    else:
        condition = {"IfMatch": over} if over and scheme_of(url) in _S3 else {}
    try:
        request(url, "written", "pipe_file", content, **condition)
    except StoreError as error:
        cause = error.__cause__
        if not condition or _NOT_KNOWN.isdisjoint({type(cause).__name__, _code_of(cause)}):
            raise
        request(url, "written", "pipe_file", content)


def remove(url: str, is_folder: bool = False) -> None:
    """Remove an object or a folder, if it is there; raises a StoreError if it cannot be removed."""
    with contextlib.suppress(MissingObjectError):
        request(url, "removed", *(("rm", True) if is_folder else ("rm_file",)))


def request(url: str, done: str, method: str, *arguments: Any, **options: Any) -> Any:
    """Return what a method of fsspec's file system returns for a URL."""
    system, path = file_system(url, **_options_of(url))
    system.invalidate_cache()  # a listing may be outdated by another process
    ends = (*arguments, path) if method == "put_file" else (path, *arguments)
    try:
        if getattr(system, "async_impl", False):
            return _awaited(system, getattr(system, f"_{method}")(*ends, **options), options.get("callback"))
        return getattr(system, method)(*ends, **options)
    except Exception as error:  # clients of stores have errors of their own
        raise _named(url, done, error) from error


def _awaited(system: Any, call: Any, callback: Any) -> Any:
    """Return what a coroutine in fsspec's event loop returns; cancelled if it moves no bytes for long."""
    import asyncio
    import concurrent.futures  # which `hvdtrain --help` does not need

    future = asyncio.run_coroutine_threadsafe(call, system.loop)
    try:
        since_seconds, before = time.monotonic(), None
        while future in concurrent.futures.wait([future], _LOOK_SECONDS).not_done:
            if (value := getattr(callback, "value", None)) != before:
                since_seconds, before = time.monotonic(), value
                ACTIVITY.progress()
            if time.monotonic() - since_seconds > STALL_SECONDS:
                raise TimeoutError(f"no answer within {STALL_SECONDS:g} s")
        return future.result()
    finally:
        future.cancel()


def _options_of(url: str) -> dict[str, Any]:
    """Return the options of a file system with which it gives up a request in a bounded time."""
    if scheme_of(url) in ("file", "local"):
        return {"auto_mkdir": True}  # folders of stores need not be made either
    if scheme_of(url) not in _S3:
        return {}
    from fsspec.config import conf

    users = [conf.get(scheme, {}).get("config_kwargs", {}) for scheme in _S3]
    return {"max_concurrency": _PARTS_AT_ONCE, "config_kwargs": {**_S3_CLIENT, **users[0], **users[1]}}


def _code_of(error: BaseException | None) -> str:
    """Return the code with which S3 refused a request, such as "NoSuchKey"; empty of other errors."""
    while error is not None:
        response = getattr(error, "response", None)  # of botocore's error, which others are made from
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def _named(url: str, done: str, error: Exception) -> StoreError:
    """Return the error that names the URL, without credentials."""
    text = " ".join(shown(str(error)).split()) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        if "specified bucket" in text:
            remedy = "Check the name of the bucket, or create it."
            return StoreError(f"{shown(url)} does not exist: {text}", remedy)
        return MissingObjectError(f"{shown(url)} does not exist")
    if isinstance(error, FileExistsError) or _code_of(error) in _UNMET:
        return ChangedObjectError(f"{shown(url)} was changed by another process")
    problem = f"{shown(url)} cannot be {done}: {text}"
    is_refused = isinstance(error, PermissionError) or text.startswith("Forbidden")  # as gcsfs says it
    if is_refused or _NO_CREDENTIALS.fullmatch(type(error).__name__):
        return StorePermissionError(
            problem, "Check the credentials of the store's client and what they permit."
        )
    return StoreError(problem)


def download(url: str, path: Path) -> None:
    """Download an object to a file, which takes its name when it is whole."""
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
    """Upload a file, and check how many bytes the store has then; an object of that name is replaced."""
    from fsspec.callbacks import Callback

    size_bytes = path.stat().st_size
    request(url, "written", "put_file", str(path), callback=Callback())
    if (found_bytes := info(url).size_bytes) < size_bytes:  # a log may have grown meanwhile
        raise ChangedObjectError(f"{shown(url)} has {found_bytes:,} bytes of {size_bytes:,}")
