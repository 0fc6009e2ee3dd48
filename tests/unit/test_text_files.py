"""Text files as tokens and windows: what is read is what stands there, wherever files and blocks end."""

import numpy as np
import pytest

from hvdtrain.data.texts import files as characters
from hvdtrain.data.texts.files import CharacterTokens, MappedFiles, Windows
from hvdtrain.errors import DataError

TEXTS = ["plain text\n" * 5, "áé🙂 ", "", "\u4e2d\u6587" * 20, "🙂" * 30, "x"]


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
        read = tokens.read(starts, length)
        assert ["".join(chr(tokens.characters[t]) for t in row) for row in read] == [
            whole[s : s + length] for s in starts
        ]


def row(length):
    """Give a row of tokens in which token k is k."""

    class Counting:
        vocabulary = length

        def __len__(self):
            return length

        def read(self, starts, count):
            found = starts[:, None] + np.arange(count)
            assert found.max() < length
            return found

    return Counting()


@pytest.mark.parametrize("stride", [1, 3, 8, 50])
@pytest.mark.parametrize("length", [9, 10, 16, 17, 100])
def test_each_place_of_the_text_begins_one_window(length, stride):
    windows = Windows(row(length), 0, length, 8, stride)
    keys = np.arange(3000, dtype=np.uint64)
    begins = [
        set(windows.augmented(np.full(len(keys), i), keys)["inputs"][:, 0].tolist())
        for i in range(len(windows))
    ]
    assert sorted(start for of_window in begins for start in of_window) == list(range(length - 8))


def test_a_target_is_the_token_after_its_input():
    windows = Windows(row(30), 10, 30, 4, 4)
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
