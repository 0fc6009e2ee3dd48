"""Pretrain a BERT of Hugging Face transformers on masked tokens, in PyTorch.

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/masked_language_model.py:MaskedLM

It needs ``pip install transformers datasets``. ``DataCollatorForLanguageModeling`` masks other tokens in each
epoch. Labels are -100 elsewhere, which the loss and the accuracy leave out. The collator is not the task's
``collate``: its random numbers would depend on the number of workers and on the reading threads. Instead, it
masks each sample with a seed of its own.

By default, the text is that of three modules of Python; ``--set task_options.path=FILE`` names another one.
"""

import collections
import json
import logging.config
import re
import string
from pathlib import Path

import numpy as np
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, DataCollatorForLanguageModeling

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = 1000
MODULES = (logging, logging.config, json)  # some text that every machine has


class Masked:
    """Blocks of tokens, some of which are masked.

    Args:
        blocks: (samples, length), the numbers of the tokens.
        tokenizer: the tokenizer that made them.
    """

    def __init__(self, blocks, tokenizer):
        self.blocks, self.tokenizer = blocks, tokenizer

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {name: values[0] for name, values in self.batch(np.asarray([index])).items()}

    def batch(self, indices):
        """Return samples for evaluation: each is always masked in the same way."""
        return self.augmented(indices, indices)

    def augmented(self, indices, keys):
        """Return samples for training: a key is a seed that depends on the epoch and the sample."""
        samples = [
            self.masked(self.blocks[index], int(key)) for index, key in zip(indices, keys, strict=True)
        ]
        return {name: np.concatenate([sample[name] for sample in samples]) for name in samples[0]}

    def masked(self, block, seed):
        collator = DataCollatorForLanguageModeling(self.tokenizer, seed=seed, return_tensors="np")
        return collator([{"input_ids": block, "attention_mask": np.ones_like(block)}])


class MaskedLM:
    """Predict masked tokens of a text.

    Args:
        path: a text file.
        length: number of tokens in a sample.
    """

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}
    defaults = {
        "epochs": 5,
        "batch_size": 16,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "lr_scaling": "sqrt",
        "lr_schedule": "linear",
        "warmup_epochs": 0.5,
        "weight_decay": 0.01,
        "decay_norms_and_biases": False,
        "clip_norm": 1.0,
    }

    def __init__(self, path=None, length=64):
        self.length = length
        files = [module.__file__ for module in MODULES] if path is None else [path]
        text = "\n".join(Path(file).read_text(encoding="utf-8") for file in files)
        self.tokenizer = BertTokenizer(vocabulary(text))
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        blocks = np.asarray(tokens[: len(tokens) // length * length]).reshape(-1, length)
        is_held_out = np.arange(len(blocks)) % 10 == 9
        self._train, self._eval = blocks[~is_held_out], blocks[is_held_out]

    def train_data(self):
        return Masked(self._train, self.tokenizer)

    def eval_data(self):
        return Masked(self._eval, self.tokenizer)

    def torch_model(self):
        config = BertConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=self.length,
        )
        return BertForMaskedLM(config)


def vocabulary(text):
    """Return the numbers of the most frequent words, and of the letters of which all others consist.

    Do not train a tokenizer in a task: the order of its tokens is by chance, so workers would differ.
    """
    counts = collections.Counter(re.findall(r"[^\W_]+", text.lower()))
    letters = sorted(set(text.lower()) - set(string.whitespace))
    words = [word for word, _ in counts.most_common(WORDS) if len(word) > 1]
    return {
        word: number for number, word in enumerate([*SPECIAL, *letters, *(f"##{x}" for x in letters), *words])
    }
