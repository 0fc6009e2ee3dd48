"""Texts: files as tokens and windows, tables with labels; and what is said of each mistake."""

import csv
import json

import numpy as np
import pytest

from hvdtrain.data.texts import files as characters
from hvdtrain.data.texts.files import CharacterTokens, MappedFiles, Windows
from hvdtrain.data.texts.labelled import PADDING, START, Encoder, read_tables, rows_of, split
from hvdtrain.errors import DataError

TEXTS = ["plain text\n" * 5, "áé🙂 ", "", "\u4e2d\u6587" * 20, "🙂" * 30, "x"]
COLUMNS = ("text", "label")
ROWS = [("hello, you", "ham"), ('say "cash"', "spam"), ("línea\tdos", "ham"), ("x", "spam")]


@pytest.fixture
def small_parts(monkeypatch):
    """Parts so short that characters lie across their ends."""
    monkeypatch.setattr(characters, "_CHUNK", 5)


@pytest.mark.parametrize("texts", [TEXTS, ["only ascii " * 9], ["ab" * 30, "cd" * 30], ["é" * 50]])
def test_every_window_holds_the_characters_that_stand_there(tmp_path, small_parts, texts):
    whole, paths = "".join(texts), [tmp_path / f"{i}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    tokens = CharacterTokens(MappedFiles(paths))
    assert len(tokens) == len(whole)
    assert tokens.vocabulary == len(set(whole))
    for length in (1, 3, 20):
        starts = np.arange(len(whole) - length + 1)
        read = ["".join(chr(tokens.characters[t]) for t in row) for row in tokens.read(starts, length)]
        assert read == [whole[s : s + length] for s in starts]


class Counting:
    """A row of tokens in which token k is k."""

    def __init__(self, length):
        self.vocabulary = length

    def __len__(self):
        return self.vocabulary

    def read(self, starts, count):
        found = starts[:, None] + np.arange(count)
        assert found.max() < len(self)
        return found


@pytest.mark.parametrize("stride", [1, 3, 8, 50])
@pytest.mark.parametrize("length", [9, 10, 16, 17, 100])
def test_each_place_of_the_text_begins_one_window(length, stride):
    windows = Windows(Counting(length), 0, length, 8, stride)
    keys = np.arange(3000, dtype=np.uint64)
    begins = []
    for i in range(len(windows)):
        begins += set(windows.augmented(np.full(len(keys), i), keys)["inputs"][:, 0].tolist())
    assert sorted(begins) == list(range(length - 8))


def test_a_target_is_the_token_after_its_input():
    windows = Windows(Counting(30), 10, 30, 4, 4)
    sample = windows[1]
    assert sample["inputs"].tolist() == [14, 15, 16, 17]
    assert sample["targets"].tolist() == [15, 16, 17, 18]
    assert len(windows) == 4  # 10-13, 14-17, 18-21, 22-25; of 26-29 the last has no target


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"good\xffbad", "0.txt is not UTF-8 text: 0xff: invalid start byte"),
        (b"0123456789\xc3", "0.txt is not UTF-8 text: 0xc3: "),
        (b"0123456789\0abc", "0.txt is not text: it contains NUL"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, small_parts, raw, said):
    path = tmp_path / "0.txt"
    path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        CharacterTokens(MappedFiles([path]))
    assert said in str(caught.value)
    assert "task_options.level=bytes" in str(caught.value)


def write(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("label", "number", "text"), *((b, 7, a) for a, b in rows)])
    elif path.suffix == ".tsv":
        lines = ["text\tlabel", *("\t".join(row).replace("línea\t", "línea ") for row in rows)]
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps({"text": a, "label": b}) + "\n\n" for a, b in rows))
    return path


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".ndjson", ".tsv"])
def test_all_kinds_of_table_give_the_same_rows(tmp_path, ending):
    expected = [(a.replace("\t", " "), b) if ending == ".tsv" else (a, b) for a, b in ROWS]
    found = rows_of(write(tmp_path / f"rows{ending}", ROWS), COLUMNS)
    assert [(text, label) for _, text, label in found] == expected


@pytest.mark.parametrize(
    ("file", "raw", "said"),
    [
        ("a.csv", b"text,label\nx,a\ny\nz,b\n", "line 3: has 1 values; the first line names 2"),
        ("a.csv", b"text,label\n\n\nx\n", "line 4: has 1 values"),
        ("a.tsv", b"text\tlabel\nx\ta\tb\n", "line 2: has 3 values"),
        ("a.csv", b"text,label\nx,a\n ,b\n", "line 3: 'text' is empty"),
        ("a.csv", b'text,label\n"x"y,a\nz,b\n', "line 2: ',' expected after '\"'"),
        ("a.csv", b"text,label\ny\xe9,b\nz,b\n", "line 2: contains the byte 0xe9"),
        ("a.jsonl", b'{"text": "x\\u0000", "label": 1}\n', "line 1: contains '\\x00'"),
        ("a.jsonl", b'{"text": "x", "label": 1}\n{"text": "y", "la', "line 2: not JSON"),
        ("a.jsonl", b'{"txt": "x"}\n', "line 1: must be an object with 'text' and 'label'"),
        ("a.jsonl", b'{"text": 5, "label": 1}\n', "line 1: 'text' must be text, found 5"),
        ("a.csv", b"txt,label\nx,a\n", "has no column 'text'; its columns are 'txt', 'label'"),
    ],
)
def test_a_bad_row_is_named_with_its_place(tmp_path, file, raw, said):
    path = tmp_path / file
    path.write_bytes(raw)
    with pytest.raises(DataError) as caught:
        list(rows_of(path, COLUMNS))
    assert file in str(caught.value)
    assert said in str(caught.value)


def encoded(texts, encoder, train):
    for text in texts:
        encoder.add(text)
    return encoder.finish(np.asarray(train))


def test_bytes_follow_the_start_and_padding_follows_them():
    tokens, vocabulary = encoded(["ab", "", "é", "long text"], Encoder(5, None), range(4))
    a, b, e1, e2 = (byte + 2 for byte in "abé".encode())
    assert tokens.tolist() == [
        [START, a, b, PADDING, PADDING],
        [START, *[PADDING] * 4],
        [START, e1, e2, PADDING, PADDING],
        [START, *(byte + 2 for byte in b"long")],
    ]
    assert vocabulary == 258


def test_words_are_numbered_by_how_often_the_training_texts_have_them():
    texts = ["b a a!", "A c", "d d d d"]
    tokens, vocabulary = encoded(texts, Encoder(6, 3), train=[0, 1])
    # a: 3 times, then !, b, c once each, of which two fit; d is not in the training texts
    assert tokens.tolist() == [[1, 5, 3, 3, 4, 0], [1, 3, 2, 0, 0, 0], [1, 2, 2, 2, 2, 0]]
    assert vocabulary == 6


def test_labels_become_numbers_and_a_second_table_brings_no_new_ones(tmp_path):
    first = write(tmp_path / "a.csv", [("x", "spam"), ("y", "ham"), ("z", "spam")])
    second = write(tmp_path / "b.csv", [("x", "ham")])
    names, numbers, sizes = read_tables([first, second], COLUMNS, Encoder(4, None))
    assert (names, numbers.tolist(), sizes) == (["ham", "spam"], [1, 0, 1, 0], [3, 1])
    second = write(tmp_path / "b.csv", [("x", "ham"), ("y", "eggs")])
    with pytest.raises(DataError, match=r"b.csv, line 3: no text in .*a.csv has the label 'eggs'"):
        read_tables([first, second], COLUMNS, Encoder(4, None))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("x", "a"), ("y", "a")], "all texts have the label 'a'"),
        ([], "has no row"),
        ([(f"x{i}", str(i)) for i in range(10_001)], "has more than 10,000 different labels"),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(tmp_path, rows, said):
    with pytest.raises(DataError, match=said):
        read_tables([write(tmp_path / "a.csv", rows)], COLUMNS, Encoder(4, None))


def test_a_split_takes_every_text_once_and_the_same_ones_each_time():
    train, evaluation = split([10], 0.25, seed=3)
    assert sorted([*train, *evaluation]) == list(range(10))
    assert len(evaluation) == 2
    assert [part.tolist() for part in split([10], 0.25, 3)] == [train.tolist(), evaluation.tolist()]
    assert split([10], 0.25, 4)[1].tolist() != evaluation.tolist()
    assert [len(part) for part in split([10], 0, 3)] == [10, 0]
    assert [len(part) for part in split([10, 4], 0.5, 3)] == [10, 4]
    with pytest.raises(DataError, match="leaves none of 1 texts for training"):
        split([1], 0.1, 0)
