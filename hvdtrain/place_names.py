"""Local copies of what lies in object stores, which texts name by its URL."""

from pathlib import Path

_URLS: dict[str, str] = {}  # by the path of the copy


def name_place(path: Path, url: str) -> None:
    """Have texts name a local copy by the URL that it was fetched from."""
    _URLS[str(path)] = url


def url_of(path: Path) -> str:
    """Return the URL that a local copy was fetched from; empty if it is none."""
    return _URLS.get(str(path), "")


def with_urls(text: str) -> str:
    """Return a text with the URLs of local copies in place of their paths."""
    for path in sorted(_URLS, key=len, reverse=True):
        text = text.replace(path, _URLS[path])
    return text
