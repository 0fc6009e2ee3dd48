"""YAML of somebody else: what is refused, and where it stands."""

import pytest

from hvdtrain.errors import ConfigError
from hvdtrain.yaml_reader import parse_yaml

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000))
LIMIT = "more than 100,000 values or 50 levels with the aliases written out"


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    prefix = "run.yaml is not valid YAML at "
    assert caught.value.problem.startswith(prefix)
    return caught.value.problem.removeprefix(prefix)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs: 1\nseed: 2\nepochs: 3\n", "line 3, column 1: the key 'epochs'{}1"),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", "line 4, column 3: the key 'b'{}2"),
        ("{a: 1, 'a': 2}", "line 1, column 8: the key 'a'{}1"),
        ("- {1: a, 1: b}", "line 1, column 10: the key '1'{}1"),
    ],
)
def test_a_key_that_is_given_twice_is_refused_with_both_lines(text, said):
    assert refused(text) == said.format(" is given a second time; the first is in line ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: " + "[" * 3000 + "]" * 3000, "line 1, column 53: nested more than 50 levels deep"),
        ("\n".join("  " * i + "a:" for i in range(200)), "line 50, column 99: nested more than 50 levels"),
        ("a: &x [1, *x]", "line 1, column 11: an alias stands for a value that contains it"),
        ("a: &x {b: *x}", "line 1, column 11: an alias stands for a value that contains it"),
        (LAUGHS, f"line 6, column 4: {LIMIT}"),
        (CHAIN, f"line 50, column 6: {LIMIT}"),
        ("seed: " + "9" * 5000, "line 1, column 7: a number of 5,000 characters"),
        ("seed: 0x" + "f" * 5000, "line 1, column 7: a number of 5,002 characters"),
        ("a: !!timestamp 2026-13-45", "line 1, column 4: month must be in 1..12"),
        ("a: [1, no]", 'line 1, column 8: no is ambiguous: write true or false, or "no" for the text'),
        ("On: 1", "line 1, column 1: On is ambiguous"),
        (
            "a: 010",
            'line 1, column 4: 010 is ambiguous: write a number without the leading zero, or "010" for',
        ),
        ("a: 08", "line 1, column 4: 08 is ambiguous"),
        ("a: !!bool perhaps", "line 1, column 4: 'perhaps'"),
        ('a: "\\ud800"', "line 1, column 4: 'utf-8' codec can't encode character"),
    ],
    ids=[
        "flow",
        "blocks",
        "list",
        "map",
        "laughs",
        "chain",
        "long",
        "hex",
        "date",
        "no",
        "key",
        "octal",
        "zero",
        "tag",
        "text",
    ],
)
def test_what_never_ends_or_cannot_be_is_refused_with_its_place(text, said):
    assert refused(text).startswith(said)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: &n 3\nb: *n\n", {"a": 3, "b": 3}),
        (
            "base: &b {x: 1, y: 2}\nmine:\n  <<: *b\n  x: 3\n",
            {"base": {"x": 1, "y": 2}, "mine": {"x": 3, "y": 2}},
        ),
        ("a: {x: 1}\nb: {x: 2}\n", {"a": {"x": 1}, "b": {"x": 2}}),
        ("1: a\n'1': b\n", {1: "a", "1": "b"}),
    ],
)
def test_aliases_and_equal_keys_in_other_mappings_are_read(text, value):
    assert parse_yaml(text, "run.yaml") == value


def test_an_error_of_syntax_shows_the_line_before():
    with pytest.raises(ConfigError, match=r"at line 4, column 1: could not find expected ':'\n  epochs 3$"):
        parse_yaml("framework: torch\ntask: x\nepochs 3\n", "it")
