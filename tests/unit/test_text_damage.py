"""Damaged text and tables: an error that names the file, or harmless; nothing else, and soon.

Each case is a sound file of some kind, damaged in some way from a seed of its own.
"""

import json
import random
import time

import numpy as np
import pytest

from hvdtrain.data.datasets import fetch
from hvdtrain.errors import DataError
from hvdtrain.tasks.classify_text import ClassifyText
from hvdtrain.tasks.text import Text

SECONDS = 60  # a bound for any case: each takes milliseconds
ROWS = [(f"text {i}, with a wörd", ("ham", "spam", "eggs")[i % 3], i) for i in range(60)]


def sound(kind, path):
    """Write a sound file of this kind and give its bytes."""
    if kind == "txt":
        path.write_text("".join(f"line {i}: söme text 🙂\n" for i in range(60)), encoding="utf-8")
    elif kind == "jsonl":
        lines = (json.dumps({"text": a, "label": b, "i": c}, ensure_ascii=False) for a, b, c in ROWS)
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        comma, quote = (",", '"') if kind == "csv" else ("\t", "")
        lines = (f"{quote}{a}{quote}{comma}{b}{comma}{c}" for a, b, c in ROWS)
        path.write_text("\r\n".join([f"text{comma}label{comma}i", *lines]), encoding="utf-8")
    return path.read_bytes()


def cut(raw, rng):
    return raw[: rng.randrange(len(raw))]


def flipped(raw, rng):
    damaged = bytearray(raw)
    for _ in range(rng.randrange(1, 8)):
        damaged[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def with_nul(raw, rng):
    start = rng.randrange(len(raw))
    return raw[:start] + bytes(rng.randrange(1, 5)) + raw[start:]


def without_a_part(raw, rng):
    start = rng.randrange(len(raw))
    return raw[:start] + raw[start + rng.randrange(1, 60) :]


def quoted(raw, rng):
    start = rng.randrange(len(raw))
    return raw[:start] + rng.choice([b'"', b"'", b"{", b"[", b"\\", b"\r", b"\n", b",", b"\t"]) + raw[start:]


def utf16(raw, rng):
    return raw.decode("latin-1").encode(rng.choice(["utf-16", "utf-16-le", "utf-32"]))


KINDS = ["txt", "csv", "tsv", "jsonl"]
DAMAGES = [cut, flipped, with_nul, without_a_part, quoted, utf16]


def read_all(kind, path, level):
    if kind == "txt":
        task = Text(path=str(path), level={"words": "characters"}.get(level, level), context=4)
    else:
        task = ClassifyText(path=str(path), context=8, level=level)
    assert task.describe()
    for data in (task.train_data(), task.eval_data()):
        batch = fetch(data, np.arange(len(data)))
        assert batch["inputs"].dtype == np.int32
        assert len(batch["inputs"]) == len(batch["targets"]) == len(data) > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_or_does_no_harm(tmp_path, kind, damage, seed):
    path = tmp_path / f"damaged.{kind}"
    path.write_bytes(damage(sound(kind, path), random.Random(f"{kind} {damage.__name__} {seed}")))
    started = time.monotonic()
    for level in ("words", "bytes"):
        said = str(path)
        try:
            read_all(kind, path, level)
        except DataError as error:
            said = str(error)
        assert str(path) in said
        assert len(said) < 1000
    assert time.monotonic() - started < SECONDS


@pytest.mark.parametrize("kind", KINDS)
def test_sound_files_are_read(tmp_path, kind):
    """Otherwise the test above would pass for nothing."""
    sound(kind, path := tmp_path / f"sound.{kind}")
    for level in ("words", "bytes"):
        read_all(kind, path, level)
