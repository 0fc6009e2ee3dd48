"""Which checkpoint is the best: how it is said, and what improves on what."""

import math

import pytest

from hvdtrain.early_stopping import MetricGoal


@pytest.mark.parametrize(
    ("text", "metric", "highest"),
    [
        ("accuracy", "accuracy", True),
        ("loss", "loss", False),
        ("top_5_error", "top_5_error", False),
        ("edit_distance", "edit_distance", False),
        ("lossless", "lossless", True),
        ("noisy/loss", "noisy/loss", False),
        ("noisy/eval_loss:max", "noisy/eval_loss", True),
        ("low_loss/accuracy", "low_loss/accuracy", True),
        ("loss:max", "loss", True),
        ("score:min", "score", False),
        ("score:max", "score", True),
    ],
)
def test_a_metric_is_best_when_highest_unless_its_name_or_the_user_says_otherwise(text, metric, highest):
    assert MetricGoal.parse(text) == MetricGoal(metric, highest)


@pytest.mark.parametrize(
    ("new", "old", "better"),
    [
        (0.5, None, True),
        (0.6, 0.5, True),
        (0.5, 0.5, False),
        (0.4, 0.5, False),
        (None, None, False),
        (None, 0.5, False),
        (math.nan, None, False),
        (math.nan, 0.5, False),
        (math.inf, 0.5, False),
    ],
)
@pytest.mark.parametrize("highest", [True, False])
def test_a_number_is_better_than_none_and_a_tie_is_no_improvement(new, old, better, highest):
    sign = 1 if highest else -1
    signed = [value if value is None else sign * value for value in (new, old)]
    assert MetricGoal("score", highest).improves(*signed) == better
