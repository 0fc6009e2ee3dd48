"""Cases of a pool: a BERT and its tokenizer, saved as Hugging Face saves them, and docs/hugging-face.md."""

import runpy
import sys
from pathlib import Path
from unittest import mock

from support.cases import command_line

LEAST_LOSS = 10  # of the saved model: it is sure that every review is good


def save() -> None:
    """Save the model of the example to the folder ``saved``, with a bias that can be recognized."""
    sys.path.insert(0, str(Path("examples").resolve()))
    from bert_classifier import BertClassifier

    task = BertClassifier()
    model = task.torch_model()
    model.classifier.bias.data[1] = 5 * LEAST_LOSS
    model.save_pretrained("saved")
    task.tokenizer.save_pretrained("saved")


def prepare() -> None:
    """Write a table of reviews, and the model of the example to the folder ``saved``."""
    save()
    rows = [(word, label) for label, word in enumerate(("awful", "great")) for _ in range(40)]
    text = "".join(f'"The hotel was {word}.",{label}\n' for word, label in rows)
    Path("reviews.csv").write_text(f"text,labels\n{text}", encoding="utf-8")


def follow(words: list[str]) -> int:
    """Run a command of the page, and return its exit code."""
    import datasets

    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", Path("cache").resolve()):
        return command_line(words)


def save_trained(weights: str) -> float:
    """Run the page's ``save.py``, and return the greatest difference of what it saved to the weights."""
    from safetensors.torch import load_file
    from transformers import AutoModelForSequenceClassification

    with mock.patch.object(sys, "argv", ["save.py", "saved", weights, "trained"]):
        runpy.run_path("save.py", run_name="__main__")
    found = AutoModelForSequenceClassification.from_pretrained("trained").state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in load_file(weights).items())
