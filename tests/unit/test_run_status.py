"""How a run ended or stands: one word for it, whoever says it."""

import math

import pytest

from hvdtrain.reporting.lock_state import Holder
from hvdtrain.reporting.stored_runs import status_of

HELD, FREE, UNSEEN = Holder(is_held=True), Holder(is_held=False), Holder()
FAR = Holder(7, "another-host", is_held=False)


@pytest.mark.parametrize(
    ("summary", "lock", "silent", "word"),
    [
        ({"status": "completed"}, FREE, 1.0, "completed"),
        ({"status": "stopped"}, HELD, 1.0, "stopped"),
        ({"status": "failed"}, UNSEEN, 1.0, "failed"),
        ({"status": "[red]"}, FREE, 1.0, "unknown"),
        ({}, FREE, 1.0, "unknown"),
        (None, HELD, math.inf, "running"),
        (None, FREE, 11.0, "killed"),
        (None, FREE, math.inf, "killed"),
        (None, FREE, 3.0, "unknown"),
        (None, FAR, 1e6, "unknown"),
        (None, UNSEEN, math.inf, "unknown"),
    ],
)
def test_one_word_for_each_case(summary, lock, silent, word):
    assert status_of(summary, lock, silent) == word
