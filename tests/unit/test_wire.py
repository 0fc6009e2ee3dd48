"""Objects that travel: they arrive as they were, and bytes of any other kind are refused."""

import json
import math
import pickle
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.data.fingerprint import Fingerprint
from hvdtrain.early_stopping import EarlyStoppingState
from hvdtrain.errors import CheckpointError, DataError, ExchangeError, HvdtrainError
from hvdtrain.jobs.resume import ResumePoint
from hvdtrain.workers import wire
from hvdtrain.workers.wire import MAX_DEPTH, decode, encode
from hvdtrain.workers.wire_types import travels

_ANY_CHARACTER = st.text(st.characters(codec="utf-8"))
_NUMBERS = (
    stnp.boolean_dtypes() | stnp.integer_dtypes(endianness="?") | stnp.floating_dtypes(endianness="?")
    | stnp.complex_number_dtypes() | stnp.datetime64_dtypes(endianness="=")
)  # fmt: skip
_ARRAYS = stnp.arrays(_NUMBERS, stnp.array_shapes(min_dims=0, min_side=0, max_side=4))
_HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | _ANY_CHARACTER,
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
_VALUES = st.recursive(
    _HASHABLE | _ARRAYS | st.builds(Path, st.text(st.characters(exclude_characters="\0", codec="utf-8"))),
    lambda inner: st.lists(inner) | st.sets(_HASHABLE) | st.dictionaries(_HASHABLE, inner) | st.tuples(inner),
    max_leaves=12,
)


def bits(value):
    """Give what two equal values have in common, with types and the bits of floats."""
    kind = type(value).__name__
    if isinstance(value, float) and not isinstance(value, np.generic):
        return kind, "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return kind, [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(bits, value)))
    if isinstance(value, list | tuple):
        return kind, list(map(bits, value))
    return kind, value


@settings(max_examples=100, deadline=None)
@given(_VALUES)
def test_a_value_arrives_as_it_was(value):
    assert bits(decode(encode(value))) == bits(value)


@pytest.mark.parametrize(
    "value",
    [
        *(1 << 63, -(1 << 63), (1 << 63) - 1, 10**4000, True, 1, 1.0, -0.0, 5e-324, 1e308),
        *(math.inf, -math.inf, math.nan),
        *("", "ä\0\n\u2028", "\U0001f600", "\udcff", b"", b"\x80\x04.", (), [()], {}, {(1, "a"): {2}}),
        *(np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2026-01-02", "ns")),
        *(np.zeros((0, 7), np.int8), np.array("x", "U3"), np.asfortranarray(np.arange(6.0).reshape(2, 3))),
        *(Path("/a/b"), Path("/a/\udcff"), {"tuple": [1]}, [{"bytes": 5}]),
        np.array([1.5, -2.0], ml_dtypes.bfloat16),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_at_an_edge_arrives_as_it_was(value):
    arrived = decode(encode(value))
    assert bits(arrived) == bits(value)
    assert type(arrived) is type(value)
    assert getattr(arrived, "dtype", None) == getattr(value, "dtype", None)


MANIFEST = Manifest(
    step=3, samples=12, data_size=40, seconds=1.5, workers=2, config={"seed": 1, "layers": [1, 2]},
    versions={"torch": "2"}, waiting=EarlyStoppingState(metric="loss:min"),
    data={"train_data": Fingerprint(size=2, samples={"x": ["a", None]})},
)  # fmt: skip


def test_objects_of_classes_that_travel_arrive_equal():
    found = Checkpoint(Path("/run/step-3"), MANIFEST)
    point = ResumePoint("x", source=found, manifest=MANIFEST, values={found.path: None, Path("b"): 1.0})
    arrived = decode(encode(point))
    assert arrived == point
    assert arrived.source == found  # which no comparison of points looks at


def test_an_error_of_a_subclass_arrives_as_the_nearest_error_of_hvdtrain():
    class OwnError(DataError):
        """A task's own."""

    arrived = decode(encode([OwnError("a: wrong", "Do b.", everywhere=True)]))[0]
    assert type(arrived) is DataError
    assert vars(arrived) == {"problem": "a: wrong", "remedy": "Do b.", "everywhere": True}


class Own:
    """No class that travels."""


Unmarked = dataclass(type("Unmarked", (), {}))  # neither, for nobody marked it
Impostor = type("Checkpoint", (), {"path": 1, "manifest": 2})  # nor if it has the name of one that is


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Own(), "a test_wire.Own"),
        ({"a": [1, (Own(),)]}, "a test_wire.Own"),
        ({Own(): 1}, "a test_wire.Own"),
        (Unmarked(), "a test_wire.Unmarked"),
        (Impostor(), "a test_wire.Checkpoint"),
        (ValueError("x"), "a builtins.ValueError"),
        (np.array([Own()]), "has the dtype object"),
        (np.zeros(2, [("a", "i4")]), "has the dtype"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_does_not_travel_is_named(value, found):
    with pytest.raises(ExchangeError, match="what this worker sends to the others cannot travel") as caught:
        encode(value)
    assert found in caught.value.problem
    assert "lists, tuples, sets and dicts" in caught.value.remedy


def nested(levels, around):
    value = around(0)
    for _ in range(levels):
        value = around(value)
    return value


def test_what_is_nested_too_deep_or_in_itself_or_too_long_is_refused_by_the_sender(monkeypatch):
    endless = []
    endless.append(endless)
    for around in (lambda value: [value], lambda value: {"a": value}, lambda _: endless):
        assert around(0) is endless or decode(encode(nested(MAX_DEPTH, around))) == nested(MAX_DEPTH, around)
        with pytest.raises(ExchangeError, match="deeper than"):
            encode(nested(MAX_DEPTH + 1, around))
    monkeypatch.setattr(wire, "MAX_TEXT_BYTES", 100)
    with pytest.raises(ExchangeError, match="takes 102 bytes, of 100"):
        encode("x" * 100)
    assert decode(encode(b"x" * 1000)) == b"x" * 1000


def test_two_classes_of_one_name_do_not_travel():
    with pytest.raises(ValueError, match="two classes that travel are called Checkpoint"):
        travels(Impostor)


def message(text, rest=b""):
    """Give a message as another program may send it."""
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<4sQ", b"hvd1", len(data)) + data + rest


class Executed:
    """Pickled, it would make a file."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


HOSTILE = {
    "nothing": b"",
    "a pickle": pickle.dumps(Executed()),
    "a long text": struct.pack("<4sQ", b"hvd1", 1 << 60) + b"{}",
    "no JSON": message(b"[1,"),
    "a level too many": message(b"[" * 100_000 + b"]" * 100_000),
    "no tag": message({}),
    "an unknown tag": message({"pickle": 3}, b"abc"),
    "huge bytes": message({"bytes": 1 << 62}),
    "bytes too many": message(1, b"abc"),
    "objects": message({"array": ["O", [1], 8]}, b"12345678"),
    "a huge array": message({"array": ["<f8", [1 << 40], 1 << 43]}),
    "a negative shape": message({"array": ["<f8", [-1, -1], 8]}, b"12345678"),
    "a shape that differs": message({"array": ["<f8", [2], 8]}, b"12345678"),
    "a dict of no pairs": message({"dict": [[1]]}),
    "an unknown class": message({"object": ["Popen", ["args"], ["true"]]}),
    "a field too many": message({"object": ["Checkpoint", ["path", "manifest", "own"], [1, 2, 3]]}),
    "fields of other types": message({"object": ["Fingerprint", ["size"], [{"tuple": []}]]}),
    "an error that is no error of hvdtrain": message({"error": ["Stopped", "a", "b", False]}),
    "an error without texts": message({"error": ["DataError", 1, None, False]}),
    "a path that is a number": message({"path": 3}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_other_bytes_are_refused_at_once(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = time.monotonic()
    with pytest.raises(ExchangeError, match="rank 1 sent what no worker of this version sends: ") as caught:
        decode(HOSTILE[name], "rank 1")
    assert time.monotonic() - begun < 20
    assert len(caught.value.problem) < 300
    assert not list(tmp_path.iterdir())


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_message_is_refused_or_gives_a_value(data):
    whole = bytearray(encode([CheckpointError("x"), (1.5, "a"), {"k": np.arange(4)}, b"abc", MANIFEST]))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for damaged in (bytes(whole), bytes(whole[:cut])):
        try:
            decode(damaged)
        except HvdtrainError as error:
            assert type(error) is ExchangeError  # noqa: PT017 - any value is as good
