"""The tasks text, classify-text and synthetic: what they find, say, take and refuse."""

import sys

import numpy as np
import pytest

from hvdtrain.data.datasets import fetch
from hvdtrain.errors import HvdtrainError, TaskError
from hvdtrain.jobs.opening.data_sets import make_task
from hvdtrain.task import built_in_names, load_task_class


def made(name, **options):
    return make_task(load_task_class(name), name, options, "torch")


def test_built_in_tasks_go_by_names_with_dashes():
    assert {"text", "classify-text", "synthetic"} <= set(built_in_names())
    with pytest.raises(TaskError, match="Did you mean 'classify-text'"):
        load_task_class("classify_text")
    with pytest.raises(TaskError, match="no built-in task '-options'"):
        load_task_class("-options")


def test_the_end_of_a_text_evaluates_and_does_not_train(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_bytes(bytes(range(1, 101)) * 10)
    task = made("text", path=str(path), level="bytes", context=9, eval_fraction=0.25)
    whole = path.read_bytes()
    train, evaluation = task.train_data(), task.eval_data()
    last = train.augmented(np.full(1000, len(train) - 1), np.arange(1000, dtype=np.uint64))
    assert bytes(last["targets"][:, -1].max(keepdims=True).astype(np.uint8)) == whole[749:750]
    seen = fetch(evaluation, np.arange(len(evaluation)))
    assert bytes(seen["inputs"].reshape(-1).astype(np.uint8)) == whole[750 : 750 + 27 * 9]
    assert bytes(seen["targets"].reshape(-1).astype(np.uint8)) == whole[751 : 751 + 27 * 9]


@pytest.mark.parametrize("model", ["mlp", "convnet", "resnet18", "gpt", "bert"])
def test_synthetic_data_fits_every_model(model):
    task = made("synthetic", model=model, samples=100, eval_samples=3, shape=[8, 8, 3], context=16)
    batch = fetch(task.train_data(), np.asarray([0, 99]))
    of_text = model in ("gpt", "bert")
    assert batch["inputs"].shape == ((2, 16) if of_text else (2, 8, 8, 3))
    assert batch["inputs"].dtype == (np.int32 if of_text else np.float32)
    assert batch["targets"].shape == ((2, 16) if model == "gpt" else (2,))
    assert (batch["targets"] < (1000 if model == "gpt" else 10)).all()
    assert len(task.eval_data()) == 3
    assert task.describe().startswith("100 ")


KEYWORD_ONLY = "keyword-only " if sys.version_info >= (3, 12) else ""  # as inspect says it
REFUSED = [
    ("text", {"context": 0}, "task_options.context must be greater than or equal to 1, found 0"),
    ("text", {"context": 10**6}, "a window needs 1,000,001 (context 1,000,000 and a target)"),
    ("text", {"path": "nowhere.txt"}, "nowhere.txt does not exist (looked in "),
    ("classify-text", {}, f"missing a required {KEYWORD_ONLY}argument: 'path'"),
    ("classify-text", {"path": "x.csv", "model": "bert"}, "x.csv does not exist"),
    ("classify-text", {"path": "x.csv", "model": "gpt"}, "task_options.model must be 'bert', found 'gpt'"),
]


@pytest.mark.parametrize(("name", "options", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_options_that_do_not_fit_are_refused(name, options, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HvdtrainError) as caught:
        made(name, **options)
    assert said in str(caught.value)
