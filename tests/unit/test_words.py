"""Words for numbers of things."""

import pytest

from hvdtrain.words import counted


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 samples"),
        (1, "1 sample"),
        (1.0, "1 sample"),
        (2, "2 samples"),
        (1797, "1,797 samples"),
        (0.5, "0.5 samples"),
        (1250.5, "1,250.5 samples"),
    ],
)
def test_only_one_thing_is_named_in_the_singular(number, text):
    assert counted(number, "sample") == text
