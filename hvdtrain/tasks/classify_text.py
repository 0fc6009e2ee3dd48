"""Classification of texts in a table: an encoder or an LSTM, trained from scratch."""

from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.datasets import ArrayDataset
from hvdtrain.data.texts.encoding import ByteEncoder, Encoder, WordEncoder
from hvdtrain.data.texts.labelled import read_tables, split
from hvdtrain.data.texts.tables import Table
from hvdtrain.models import bert, lstm
from hvdtrain.task import Arrays
from hvdtrain.tasks import _options as options

LEVELS = ("words", "bytes")
MODELS = ("bert", "lstm")


class ClassifyText:
    """Learn the label of a text from a CSV, TSV, JSONL or Parquet file.

    Args:
        path: the table.
        text: its column with the text.
        label: its column with the label, any words or whole numbers.
        eval_path: a second table to evaluate on; if None, a part of the first.
        eval_fraction: share of the first that is kept for evaluation, where there is no second.
        split_seed: seed of that split.
        bad_rows: "error" to end at a row that cannot be used, "skip" to count it and go on.
        level: what a token is: "words" (with single signs), or "bytes".
        most_words: words in the vocabulary, which is made of the training texts.
        context: tokens that the model sees of a text, and one that stands before them.
        model: "bert" or "lstm".
        layers: blocks or LSTMs of the model.
        heads: attention heads of each block of bert.
        channels: width of the model.
        dropout: share of activations that bert leaves out in training.

    Raises:
        DataError: where the table cannot be read or trained on, with the line or row.
    """

    loss = "cross_entropy"
    metrics: ClassVar = {"accuracy": "accuracy"}
    defaults: ClassVar = {
        "epochs": 10,
        "batch_size": 32,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "lr_scaling": "sqrt",
        "lr_schedule": "cosine",
        "warmup_epochs": 0.5,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
        "initial_parameters": "portable",
    }

    def __init__(
        self,
        *,
        path: str,
        text: str = "text",
        label: str = "label",
        eval_path: str | None = None,
        eval_fraction: float = 0.1,
        split_seed: int = 0,
        bad_rows: str = "error",
        level: str = "words",
        most_words: int = 20_000,
        context: int = 64,
        model: str = "bert",
        layers: int = 2,
        heads: int = 4,
        channels: int = 64,
        dropout: float = 0.1,
    ) -> None:
        self._level = options.choice("level", level, LEVELS)
        self._model = options.choice("model", model, MODELS)
        self._sizes = _sizes(
            model, context=context, layers=layers, heads=heads, channels=channels, dropout=dropout
        )
        share = options.fraction("eval_fraction", eval_fraction)
        seed = options.whole("split_seed", split_seed, 0, (1 << 32) - 1)
        most_words = options.whole("most_words", most_words, 1)
        encoder: Encoder = WordEncoder(context, most_words) if level == "words" else ByteEncoder(context)
        columns = (options.text("text", text), options.text("label", label))
        bad_rows = options.choice("bad_rows", bad_rows, ("error", "skip"))
        paths = [options.text("path", path)]
        if eval_path is not None:
            paths.append(options.text("eval_path", eval_path))
        self._tables = [Table(Path(place).expanduser(), *columns, bad_rows) for place in paths]
        labels = read_tables(self._tables, encoder)
        self._train, self._eval = split(labels.sizes, share, seed)
        self._classes = labels.names
        encoded = encoder.finish(self._train)
        self._sizes |= {"vocabulary": encoded.vocabulary, "classes": len(labels.names)}
        self._arrays: Arrays = {"inputs": encoded.tokens, "targets": labels.numbers}

    def describe(self) -> str:
        """Say what was found."""
        shown = ", ".join(name[:20] for name in self._classes[:6])
        shown += ", ..." if len(self._classes) > 6 else ""
        classes = f"{len(self._classes):,} classes ({shown})"
        said = f"{_counted(len(self._train), 'text')} in {classes} to train on"
        if len(self._eval):
            said += f", {len(self._eval):,} to evaluate"
        if self._level == "words":
            said += f", a vocabulary of {self._sizes['vocabulary']:,}"
        left_out = [problem for table in self._tables for problem in table.left_out]
        if left_out:
            said += f"; {_counted(len(left_out), 'row')} left out, the first: {left_out[0].problem}"
        return said

    def train_data(self) -> ArrayDataset:
        """Give the training data: inputs (context,) tokens; targets the class."""
        return self._part(self._train)

    def eval_data(self) -> ArrayDataset | None:
        """Give the evaluation data, likewise."""
        return self._part(self._eval) if len(self._eval) else None

    def torch_model(self) -> Any:
        """Build the PyTorch model."""
        return self._module().torch_model(**self._sizes)

    def tf_model(self) -> Any:
        """Build its Keras twin."""
        return self._module().tf_model(**self._sizes)

    def _module(self) -> ModuleType:
        return bert if self._model == "bert" else lstm

    def _part(self, rows: NDArray[np.int64]) -> ArrayDataset:
        return ArrayDataset({name: values[rows] for name, values in self._arrays.items()})


task = ClassifyText


def _sizes(
    model: str, *, context: int, layers: int, heads: int, channels: int, dropout: float
) -> dict[str, Any]:
    """Check the sizes of a model and give those that it takes."""
    common = {
        "layers": options.whole("layers", layers, 1, 1000),
        "channels": options.whole("channels", channels, 1, 1 << 16),
    }
    of_bert = {
        "context": options.whole("context", context, 2, 1 << 16),
        "heads": options.whole("heads", heads, 1, 1000),
        "dropout": options.fraction("dropout", dropout),
    }
    return {**common, **of_bert} if model == "bert" else {**common}


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
