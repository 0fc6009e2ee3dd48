"""Classification of the texts of a table by a BERT-style encoder, trained from scratch."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hvdtrain.data.datasets import ArrayDataset
from hvdtrain.data.texts.labelled import Encoder, read_tables, split
from hvdtrain.models import bert
from hvdtrain.models.choose import BuiltIn
from hvdtrain.storage.text import counted
from hvdtrain.task import Arrays
from hvdtrain.tasks import _options as options


class ClassifyText(BuiltIn):
    """Classify the texts of a CSV, TSV or JSONL file.

    Args:
        path: the table.
        text: the column with the text.
        label: the column with the label, text or integers.
        eval_path: a second table for evaluation; if None, a part of the first is used.
        eval_fraction: fraction of the first table for evaluation, if there is no second.
        split_seed: seed of that split.
        level: the kind of tokens: "words" (and single punctuation marks), or "bytes".
        most_words: size of the vocabulary, which consists of words of the training texts.
        context: tokens of a text that the model sees, including one that precedes the text.
        model: "bert", the only one.
        layers: blocks of the model.
        heads: attention heads of each block.
        channels: width of the model.
        dropout: fraction of activations that are dropped in training.

    Raises:
        DataError: If the table cannot be read or used for training, naming the line.
    """

    defaults: ClassVar = options.TEXT_DEFAULTS | {"epochs": 10, "batch_size": 32, "warmup_epochs": 0.5}

    @options.checked
    def __init__(
        self,
        *,
        path: options.Text,
        text: options.Text = "text",
        label: options.Text = "label",
        eval_path: options.Text | None = None,
        eval_fraction: options.Fraction = 0.1,
        split_seed: options.Seed = 0,
        level: Literal["words", "bytes"] = "words",
        most_words: options.Count = 20_000,
        context: Annotated[int, Field(ge=2, le=1 << 16)] = 64,
        model: Literal["bert"] = "bert",  # which old configs and checkpoints state
        layers: options.Layers = 2,
        heads: options.Layers = 4,
        channels: options.Count = 64,
        dropout: options.Fraction = 0.1,
    ) -> None:
        self._level = level
        encoder = Encoder(context, most_words if level == "words" else None)
        paths = [Path(place).expanduser() for place in (path, eval_path) if place is not None]
        self._classes, targets, sizes = read_tables(paths, (text, label), encoder)
        self._train, self._eval = split(sizes, eval_fraction, split_seed)
        tokens, vocabulary = encoder.finish(self._train)
        self._sizes: dict[str, Any] = {
            "context": context,
            "vocabulary": vocabulary,
            "classes": len(self._classes),
        }
        self._sizes |= {"layers": layers, "heads": heads, "channels": channels, "dropout": dropout}
        self._arrays: Arrays = {"inputs": tokens, "targets": targets}

    def describe(self) -> str:
        """Return a description of the data that was found."""
        shown = ", ".join(name[:20] for name in self._classes[:6])
        shown += ", ..." if len(self._classes) > 6 else ""
        classes = f"{len(self._classes):,} classes ({shown})"
        description = f"{counted(len(self._train), 'text')} in {classes} to train on"
        if len(self._eval):
            description += f", {len(self._eval):,} to evaluate"
        if self._level == "words":
            description += f", a vocabulary of {self._sizes['vocabulary']:,}"
        return description

    def train_data(self) -> ArrayDataset:
        """Return the training data: inputs (context,), the tokens; targets, the class."""
        return self._part(self._train)

    def eval_data(self) -> ArrayDataset | None:
        """Return the evaluation data, of the same form."""
        return self._part(self._eval) if len(self._eval) else None

    def _built_in(self) -> tuple[Any, dict[str, Any]]:
        return bert, self._sizes

    def _part(self, rows: NDArray[np.int64]) -> ArrayDataset:
        return ArrayDataset({name: values[rows] for name, values in self._arrays.items()})


task = ClassifyText
