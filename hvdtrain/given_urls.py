"""URLs as users give them: checked before anything uses them."""

import re

from hvdtrain.storage.urls import PASSWORD, TOKEN, scheme_of, shown

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.*[^/].*", re.DOTALL | re.IGNORECASE)
_ONE_SLASH = re.compile(r"(s3a?|gs|gcs|az|abfss?|https?|memory|file):/(?!/).+", re.DOTALL | re.IGNORECASE)


def check_url(url: str) -> str:
    """Return the URL of a folder or an object as a user gives it, without slashes at its end.

    The scheme is in small letters, so that one place has one name.

    Raises:
        ValueError: If it is none, or has a password or a token in it.
    """
    if not _URL.fullmatch(url) or "::" in url:
        raise ValueError(f"{shown(url)} is no URL such as s3://bucket/folder")
    for kind, pattern in (("password", PASSWORD), ("token", TOKEN)):
        if pattern.search(url):
            raise ValueError(
                f"{shown(url)} has a {kind} in it, which would be written to files; "
                "configure it in the store's client"
            )
    _, mark, inside = url.rstrip("/").partition("://")
    return f"{scheme_of(url)}{mark}{inside}"


def check_is_no_lost_url(path: str) -> None:
    """Check that a path is not what ``pathlib.Path`` makes of a URL.

    Raises:
        ValueError: If it is, with what to write instead.
    """
    if _ONE_SLASH.fullmatch(path):
        scheme, _, inside = path.partition(":/")
        raise ValueError(
            f"a URL has two slashes after its colon: write {shown(f'{scheme}://{inside}')}, in Python as a "
            f"str, because a Path makes one slash of two; for a folder named {scheme}: write ./{shown(path)}"
        )
