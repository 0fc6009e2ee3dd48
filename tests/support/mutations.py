"""Damaging files in ways that happen: cut short, changed bytes, other content, wild numbers."""

import random
from collections.abc import Iterator


def truncated(content: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield a content cut at several places, near its start and all over it."""
    lengths = {0, 1, 3, 7, 15, len(content) - 1}
    lengths |= {len(content) * place // count for place in range(count)}
    for length in sorted(length for length in lengths if length < len(content)):
        yield f"cut to {length} bytes", content[:length]


def changed(
    content: bytes, count: int, within: int | None = None, seed: int = 0
) -> Iterator[tuple[str, bytes]]:
    """Yield a content with a byte changed, and with several, of the first ``within`` if given."""
    chosen = random.Random(seed)
    for place in range(count):
        damaged = bytearray(content)
        for _ in range(1 if place % 2 else 4):
            damaged[chosen.randrange(min(within or len(content), len(content)))] ^= chosen.randrange(1, 256)
        yield f"changed {place}", bytes(damaged)


REPLACED = {
    "nothing": b"",
    "text": b"these are no images\n" * 50,
    "zeros": bytes(5000),
    "noise": random.Random(0).randbytes(5000),
    "a web page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "gzip's head": b"\x1f\x8b\x08\x00" + bytes(20),
    "zip's head": b"PK\x03\x04" + bytes(40),
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.",
}


def every(
    content: bytes, count: int, header: int = 0, numbers: tuple[int, ...] = ()
) -> Iterator[tuple[str, bytes]]:
    """Yield all of these of one content; ``numbers`` is where big-endian sizes of 4 bytes lie."""
    yield from truncated(content, count)
    yield from changed(content, count)
    if header:
        yield from changed(content, count, within=header, seed=1)
    for place in numbers:
        for value in (b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00" * 4):
            yield f"{value.hex()} at {place}", content[:place] + value + content[place + 4 :]
    yield from REPLACED.items()
