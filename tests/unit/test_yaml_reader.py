"""YAML of somebody else: what is refused, and where it stands."""

import pytest

from hvdtrain.config.yaml_reader import parse_yaml
from hvdtrain.errors import ConfigError


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


def test_an_alias_is_refused():
    assert refused("a: &x 1\nb: *x\n") == "line 2, column 4: an alias: write the value out"
