"""Tables of texts with labels: what each kind of file gives, and what is said of each mistake."""

import csv
import json

import numpy as np
import pytest

from hvdtrain.data.texts.labelled import PADDING, START, Encoder, read_tables, rows_of, split
from hvdtrain.errors import DataError

COLUMNS = ("text", "label")
ROWS = [("hello, you", "ham"), ('say "cash"', "spam"), ("línea\tdos", "ham"), ("x", "spam")]


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


def encoded(texts, encoder, train=None):
    for text in texts:
        encoder.add(text)
    return encoder.finish(np.arange(len(texts)) if train is None else np.asarray(train))


def test_bytes_follow_the_start_and_padding_follows_them():
    tokens, vocabulary = encoded(["ab", "", "é", "long text"], Encoder(5, None))
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
