"""A case of a pool: a BERT and its tokenizer, saved as Hugging Face saves them."""

import sys
from pathlib import Path

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
