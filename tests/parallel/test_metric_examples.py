"""The examples whose metrics are of the whole evaluation: two workers learn something, as those say."""

import pytest
from support.documents import ROOT
from support.jobs import FRAMEWORKS
from support.pool import controller_of, train

# task: its options, and what the metrics must reach
EXAMPLES = {
    "diabetes.py:Diabetes": ((), {"r2": 0.28}),
    "multi_label.py:Topics": (("--epochs", "4"), {"f1": 0.5, "recall": 0.4, "auc": 0.7, "accuracy": 0.65}),
    "segmentation.py:Shapes": (
        ("--epochs", "3", "--set", "task_options.samples=160", "--set", "task_options.channels=4"),
        {"mean_iou": 0.3, "accuracy": 0.8},
    ),
}


@pytest.mark.parametrize("task", EXAMPLES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_example_learns(framework, task, tmp_path):
    options, least = EXAMPLES[task]
    words = ("--framework", framework, "--task", f"{ROOT}/examples/{task}", "--device", "cpu", *options)
    final = train(2, controller_of(framework, 2), *words, cwd=tmp_path).summary["final"]
    assert {name: final[name] >= value for name, value in least.items()} == dict.fromkeys(least, True), final
