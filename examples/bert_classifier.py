"""Classify texts with BERT of Hugging Face transformers, in PyTorch.

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/bert_classifier.py:BertClassifier

It needs ``pip install transformers datasets``. The data set keeps the tokenizer's columns (``input_ids``,
``token_type_ids``, ``attention_mask``) and its ``labels``. The model is given the columns that it takes by
name, and the loss reads the ``logits`` of its output.

By default, a small BERT with random weights learns from reviews that the task makes up. To fine-tune
pretrained weights, name a model of the hub or a folder:
``--set task_options.pretrained=google-bert/bert-base-uncased``.
"""

import random
import re

import datasets
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertTokenizer

import hvdtrain

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GOOD = ("great", "lovely", "superb", "charming", "delicious", "friendly")
BAD = ("awful", "dull", "rude", "stale", "noisy", "overpriced")
PLACES = ("hotel", "restaurant", "museum", "cinema", "bakery", "campsite")
NEUTRAL = (
    "We went there on a Monday.",
    "It is near the station.",
    "We had heard of it before.",
    "It rained.",
)


class BertClassifier:
    """Tell good reviews from bad ones, by their title and their text.

    Args:
        pretrained: a model of the Hugging Face hub or a folder; a small BERT with random weights if None.
    """

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}
    # each batch is padded to the next power of two of its longest review
    collate = hvdtrain.pad({"input_ids": 0, "token_type_ids": 0, "attention_mask": 0})
    defaults = {
        "epochs": 3,
        "batch_size": 16,
        "optimizer": "adamw",
        "learning_rate": 5e-4,
        "lr_scaling": "sqrt",
        "lr_schedule": "linear",
        "warmup_epochs": 0.3,
        "weight_decay": 0.01,
        "decay_norms_and_biases": False,
        "clip_norm": 1.0,
    }

    def __init__(self, pretrained=None):
        datasets.disable_progress_bars()  # of every worker
        self.pretrained = pretrained
        self._train, self._eval = made_up(800, seed=0), made_up(200, seed=1)
        if pretrained is None:
            self.tokenizer = BertTokenizer(vocabulary([*self._train["title"], *self._train["text"]]))
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(pretrained)

    def train_data(self):
        return self.tokenized(self._train)

    def eval_data(self):
        return self.tokenized(self._eval)

    def tokenized(self, data):
        return data.map(
            lambda rows: self.tokenizer(rows["title"], rows["text"], truncation=True, max_length=128),
            batched=True,
            remove_columns=["title", "text"],
        )

    def torch_model(self):
        if self.pretrained is not None:
            return AutoModelForSequenceClassification.from_pretrained(self.pretrained, num_labels=2)
        config = BertConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=128,
            num_labels=2,
        )
        return AutoModelForSequenceClassification.from_config(config)


def vocabulary(texts):
    """Return the number of each word.

    Do not train a tokenizer in a task: the order of its tokens is by chance, so workers would differ.
    """
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    return {word: number for number, word in enumerate([*SPECIAL, *words])}


def made_up(size, seed):
    """Return a data set of reviews, with a title, a text and a label each; the same on every worker."""
    draw = random.Random(seed)
    rows = []
    for _ in range(size):
        label, place = draw.randrange(2), draw.choice(PLACES)
        words = draw.sample(GOOD if label else BAD, 3)
        sentences = [f"The {place} was {words[1]} and {words[2]}.", *draw.sample(NEUTRAL, draw.randrange(4))]
        draw.shuffle(sentences)
        rows.append({"title": f"A {words[0]} {place}", "text": " ".join(sentences), "labels": label})
    return datasets.Dataset.from_list(rows)
