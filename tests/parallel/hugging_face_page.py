"""Cases of a pool: what docs/hugging-face.md does, with the model of ``saved_bert`` and a cache beside it."""

import runpy
import sys
from pathlib import Path
from unittest import mock

from saved_bert import save
from support.cases import command_line


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
