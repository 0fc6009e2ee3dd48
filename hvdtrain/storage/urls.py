"""URLs of object stores and of the other file systems of fsspec, and what is read and written there.

Every request is bounded in time and tried again with growing waits, and every error is a ``StoreError``,
which is an OSError: a store that cannot be reached is to a caller as a disk that cannot be read.
"""

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az"}
PASSWORD = re.compile(r"(?<=://)([^/@\s:]*):(?!\d+/)\S*@")  # passwords may have a / or an @ in them
TOKEN = re.compile(r"\b((?:https?|s3a?|gs|gcs)://)[^/@\s:?#]+@", re.I)  # others name users and containers so
_SECRETS = re.compile(r"([?&][\w.-]*(?:sig|signature|token|credential|secret|key)[\w.-]*=)[^&\s\"'>]+", re.I)
_FINAL_ERRORS = (  # the same request would fail again
    *(FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError),
    *(ImportError, NotImplementedError, TypeError, ValueError),
)
_NO_CREDENTIALS = re.compile("(NoCredentials|PartialCredentials|DefaultCredentials)Error|ProfileNotFound")
_S3 = ("s3", "s3a")
_UNMET = ("PreconditionFailed", "412")  # answers to a condition that does not hold
_NOT_KNOWN = {"NotImplemented", "501", "TypeError", "ParamValidationError"}  # of old clients, too
_AZURE = ("az", "abfs")  # adlfs takes conditions for options of its client
_WRITES = ("pipe_file", "put_file", "cp_file", "rm_file")
READ_ONLY = ("http", "https")
BLOCK_BYTES = 8_000_000
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Patience:
    """How long requests may take."""

    stall_seconds: float = 60.0  # in which one moves no bytes; it moves at most a block of 8 MB
    tries: int = 5  # how often it is sent
    first_wait_seconds: float = 0.5  # before the second try; each further wait is twice as long


PATIENCE = Patience()


class Traffic:
    """The bytes that were moved to and from stores, in blocks; what is moved again counts once."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        self._known: dict[tuple[str, str], int] = {}

    def count(self, url: str, method: str, end: int) -> None:
        """Count what a request has moved of an object, whose bytes up to ``end`` are there now."""
        before = self._known.get((url, method), 0)
        if -(-end // BLOCK_BYTES) > -(-before // BLOCK_BYTES):
            self.moved_bytes += end - before
            self._known[url, method] = end

    def begin_anew(self) -> None:
        """Count each object once more."""
        self._known.clear()


TRAFFIC = Traffic()


class StoreError(OSError):
    """An object cannot be read or written, or the store cannot be reached."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


class MissingObjectError(StoreError, FileNotFoundError):
    """There is no such object, folder or bucket."""


class MissingBucketError(MissingObjectError):
    """There is no such bucket, which is more than an empty folder."""


class ExistingObjectError(StoreError, FileExistsError):
    """There is such an object already."""


class StorePermissionError(StoreError, PermissionError):
    """The store refuses the request, or there are no credentials for it."""


class ChangedObjectError(StoreError):
    """An object is not what it should be, or changed since or while it was read."""


@dataclass(frozen=True)
class ObjectInfo:
    """What a store says of an object or of a folder, which is what has objects below its name.

    Attributes:
        url, size_bytes, is_folder: its URL, and its size; 0 of a folder.
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


def _info_of(url: str, found: dict[str, Any]) -> ObjectInfo:
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


def parent(url: str) -> str:
    """Return the URL of the folder that an object or a folder lies in; a bucket is its own."""
    scheme, _, inside = url.rstrip("/").partition("://")
    above = inside.rpartition("/")[0]
    return f"{scheme}://{above}" if above.strip("/") else f"{scheme}://{inside}"


def is_s3(url: str) -> bool:
    """Return whether a URL is of a store that speaks S3."""
    return scheme_of(url) in _S3


def name(url: str) -> str:
    """Return the last part of a URL."""
    return url.rstrip("/").rpartition("/")[2]


def file_system(url: str, **options: Any) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it.

    Raises:
        StoreError: If the package for it is not installed, or it cannot be reached.
    """
    extra = _EXTRAS.get(scheme_of(url))
    remedy = f"pip install 'hvdtrain[{extra}]'" if extra else "Install the package that it needs."
    try:
        from fsspec.core import url_to_fs

        inside = url.partition("://")[2]
        return cast(tuple[Any, str], url_to_fs(f"{scheme_of(url)}://{inside}", **options))
    except ImportError as error:
        raise StoreError(f"{shown(url)} cannot be opened: {error}", remedy) from None
    except Exception as error:  # clients of stores have errors of their own
        raise _named(url, "opened", error, 1) from None


def info(url: str, patience: Patience = PATIENCE) -> ObjectInfo:
    """Return what the store says of an object or a folder; raises a MissingObjectError if there is none."""
    found = request(url, "read", patience, "info")
    if found.get("type") != "directory" and found.get("size") is None:
        raise StoreError(f"{shown(url)} cannot be read: the server does not say how many bytes it has")
    return _info_of(url, found)


def entries(url: str, patience: Patience = PATIENCE) -> list[ObjectInfo]:
    """Return the objects and folders of a folder, sorted by name; none if there is no such folder.

    Raises:
        MissingBucketError: If there is no such bucket, as far as the store says so.
    """
    try:
        found = request(url, "listed", patience, "ls", detail=True)
    except MissingBucketError:
        raise
    except MissingObjectError:
        return []
    _, inside = file_system(url, **_options_of(url))
    own = inside.strip("/")
    paths = {str(one["name"]).strip("/"): one for one in found}
    inner = sorted(path for path in paths if path.startswith(f"{own}/"))  # not the mark of a folder
    return [_info_of(join(url, name(path)), paths[path]) for path in inner]


def objects_below(url: str) -> list[ObjectInfo]:
    """Return all objects in a folder and in its folders; raises as ``entries`` does."""
    found = (objects_below(one.url) if one.is_folder else [one] for one in entries(url))
    return [one for some in found for one in some]


def read(url: str, limit_bytes: int, patience: Patience = PATIENCE) -> bytes:
    """Return the content of a small object; raises a StoreError also if it has more bytes than that."""
    return read_version(url, limit_bytes, patience)[0]


def read_version(url: str, limit_bytes: int, patience: Patience = PATIENCE) -> tuple[bytes, str | None]:
    """Return what ``read`` does, and the tag of that version or an older one; None if the store has none."""
    content, found = b"", info(url, patience)
    if found.size_bytes <= limit_bytes:
        at_once = {"max_concurrency": 1} if is_s3(url) else {}  # one answer has one version of it
        content = cast(bytes, request(url, "read", patience, "cat_file", **at_once))
    if max(found.size_bytes, len(content)) > limit_bytes:
        raise ChangedObjectError(f"{shown(url)} has more than the {limit_bytes:,} bytes that are expected")
    return content, found.tag or None


def write(url: str, content: bytes, patience: Patience = PATIENCE, *, over: str | None = None) -> None:
    """Write a small object.

    Args:
        url: where to.
        content: what to write.
        patience: how long it may take.
        over: the tag of the version that it takes the place of, empty if there must be none, None for any.
            Only some stores check that while they write, as S3 does, and a server that says that it does not
            know the condition writes without it. After a lost answer, what was written itself is there.

    Raises:
        ChangedObjectError, ExistingObjectError: If there is another version now.
        StoreError: If it cannot be written.
    """
    if over == "" and scheme_of(url) not in _AZURE:
        condition = {"mode": "create"}
    else:
        condition = {"IfMatch": over} if over and is_s3(url) else {}
    request(url, "written", patience, "pipe_file", content, **condition)


def remove(url: str, patience: Patience = PATIENCE) -> None:
    """Remove an object, which may be gone already; raises a StoreError if it cannot be removed."""
    with contextlib.suppress(MissingObjectError):
        request(url, "removed", patience, "rm_file")


def request(
    url: str,
    done: str,
    patience: Patience,
    method: str,
    *arguments: Any,
    progress: Any = None,
    **options: Any,
) -> Any:
    """Return what a method of fsspec's file system returns for a URL, tried again while that can help.

    Args:
        url: of the object; its path in the file system is the method's first argument.
        done: what is to be done with it, such as "read"; for messages.
        patience: how long it may take.
        method: such as "cat_file".
        *arguments: the method's further arguments.
        **options: those by name.
        progress: fsspec's callback, whose ``value`` grows with the bytes that were moved; None without one.

    Raises:
        StoreError: saying what failed.
    """
    if method in _WRITES and scheme_of(url) in READ_ONLY:
        raise StorePermissionError(f"{shown(url)} cannot be {done}: http:// and https:// are only read")
    system, path = file_system(url, **_options_of(url))
    if hasattr(system, "retries"):
        system.retries = 1  # those of s3fs are not bounded in time
    is_asynchronous = bool(getattr(system, "async_impl", False))
    ends = (*arguments, path) if method == "put_file" else (path, *arguments)
    call = partial(getattr(system, f"_{method}" if is_asynchronous else method), *ends, **options)
    for number in range(1, patience.tries + 1):
        system.invalidate_cache()  # a listing may be outdated by another process
        try:
            if progress is not None:
                progress.absolute_update(0)
            count = partial(TRAFFIC.count, url, method)
            found = _awaited(system, call, patience, progress, count) if is_asynchronous else call()
            if "end" in options and len(found) != options["end"] - options["start"]:
                raise OSError(f"{len(found):,} bytes came, of {options['end'] - options['start']:,}")
            if progress is not None:
                count(progress.value)
            elif isinstance(found, bytes):
                count((options.get("start") or 0) + len(found))
            return found
        except Exception as error:
            is_unknown = not _NOT_KNOWN.isdisjoint({type(error).__name__, _code_of(error)})
            if is_unknown and not {"mode", "IfMatch"}.isdisjoint(options):
                return request(url, done, patience, method, *arguments)  # without the condition
            if number == patience.tries or not _is_passing(error):
                raise _named(url, done, error, number) from error
        time.sleep(patience.first_wait_seconds * 2 ** (number - 1))
    raise AssertionError("a request is sent at least once")


def _awaited(
    system: Any, call: Callable[[], Any], patience: Patience, progress: Any, count: Callable[[int], None]
) -> Any:
    """Return what a coroutine in fsspec's event loop returns; cancelled if it moves no bytes for long."""
    import asyncio
    import concurrent.futures  # which `hvdtrain --help` does not need

    future = asyncio.run_coroutine_threadsafe(call(), system.loop)
    try:
        since_seconds, before = time.monotonic(), None
        while True:
            concurrent.futures.wait([future], min(_LOOK_SECONDS, patience.stall_seconds))
            if future.done():
                return future.result()
            if (value := getattr(progress, "value", None)) != before:
                since_seconds, before = time.monotonic(), value
                count(value or 0)
            if time.monotonic() - since_seconds > patience.stall_seconds:
                raise TimeoutError(f"no answer within {patience.stall_seconds:g} s")
    finally:
        future.cancel()


def _options_of(url: str) -> dict[str, Any]:
    """Return the options of a file system with which it gives up a request in a bounded time."""
    if scheme_of(url) in ("file", "local"):
        return {"auto_mkdir": True}  # folders of stores need not be made either
    if not is_s3(url):
        return {}
    from fsspec.config import conf

    own = {"connect_timeout": 5, "read_timeout": 30, "retries": {"total_max_attempts": 1}}
    users = [conf.get(scheme, {}).get("config_kwargs", {}) for scheme in _S3]
    return {"config_kwargs": {**own, **users[0], **users[1]}}


def _is_passing(error: Exception) -> bool:
    """Return whether the same request may succeed later."""
    is_final = isinstance(error, _FINAL_ERRORS) or _NO_CREDENTIALS.fullmatch(type(error).__name__)
    return not is_final and _code_of(error) not in _UNMET


def _code_of(error: BaseException | None) -> str:
    """Return the code with which S3 refused a request, such as "NoSuchKey"; empty of other errors."""
    while error is not None:
        response = getattr(error, "response", None)  # of botocore's error, which others are made from
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def _named(url: str, done: str, error: Exception, tries: int) -> StoreError:
    """Return the error that names the URL, without credentials."""
    text = " ".join(shown(str(error)).split()) or type(error).__name__
    text = f"{text} ({tries} tries)" if tries > 1 else text
    if isinstance(error, FileNotFoundError):
        if "specified bucket" in text:
            return MissingBucketError(
                f"{shown(url)} does not exist: {text}", "Check the name of the bucket, or create it."
            )
        return MissingObjectError(f"{shown(url)} does not exist")
    if isinstance(error, FileExistsError):
        return ExistingObjectError(f"{shown(url)} exists already")
    if _code_of(error) in _UNMET:
        return ChangedObjectError(f"{shown(url)} was changed by another process")
    problem = f"{shown(url)} cannot be {done}: {text}"
    is_refused = isinstance(error, PermissionError) or text.startswith("Forbidden")  # as gcsfs says it
    if is_refused or _NO_CREDENTIALS.fullmatch(type(error).__name__):
        return StorePermissionError(
            problem, "Check the credentials of the store's client and what they permit."
        )
    return StoreError(problem)
