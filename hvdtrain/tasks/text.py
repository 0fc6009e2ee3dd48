"""Language modelling: a GPT that predicts the next character or byte of any text."""

from typing import Any, ClassVar, Literal

from hvdtrain.data.texts.files import CharacterTokens, MappedFiles, Tokens, Windows, find_files, python_files
from hvdtrain.errors import DataError
from hvdtrain.models import gpt
from hvdtrain.models.choose import BuiltIn
from hvdtrain.tasks import _options as options


class Text(BuiltIn):
    """Learn the next character (or byte) of a text from those before it.

    Args:
        path: a text file or a folder of text files; by default the source of Python's own library.
        level: the kind of tokens: "characters" of UTF-8 text, or "bytes" of any file.
        pattern: pattern of the file names in a folder.
        context: tokens that the model sees.
        stride: tokens from one window of the training data to the next; by default ``context``, so
            that an epoch reads the text once.
        eval_fraction: fraction of the text, at its end, for evaluation.
        layers: blocks of the model.
        heads: attention heads of each block.
        channels: width of the model.
        dropout: fraction of activations that are dropped in training.

    Raises:
        DataError: If the text cannot be read or is too short.
    """

    class_axis = -1  # a context can be as long as the vocabulary
    defaults: ClassVar = options.TEXT_DEFAULTS | {"epochs": 2, "batch_size": 16, "warmup_epochs": 0.1}
    defaults |= {"lr_final_fraction": 0.1, "adam_beta2": 0.99}

    @options.checked
    def __init__(
        self,
        *,
        path: options.Text | None = None,
        level: Literal["characters", "bytes"] = "characters",
        pattern: options.Text = "*.txt",
        context: options.Count = 64,
        stride: options.Count | None = None,
        eval_fraction: options.Fraction = 0.1,
        layers: options.Layers = 4,
        heads: options.Layers = 4,
        channels: options.Count = 128,
        dropout: options.Fraction = 0.0,
    ) -> None:
        self._level, self._context = level, context
        self._sizes = {"layers": layers, "heads": heads, "channels": channels, "dropout": dropout}
        paths, self._name = python_files() if path is None else (find_files(path, pattern), path)
        files = MappedFiles(paths)
        if path is not None:
            self._name = str(paths[0]) if len(paths) == 1 else f"{path} ({len(files.paths):,} files)"
        self._tokens: Tokens = files if level == "bytes" else CharacterTokens(files)
        size = len(self._tokens)
        kept = int(size * (1 - eval_fraction))
        self._train = Windows(self._tokens, 0, kept, context, stride or context)
        self._eval = Windows(self._tokens, kept, size, context, context) if eval_fraction else None
        for purpose, length in (("training", kept), ("evaluation", size - kept)):
            if length <= context and (purpose == "training" or eval_fraction):
                raise DataError(
                    f"{self._name} has {size:,} {level}, of which {length:,} are for {purpose}; a window "
                    f"needs {context + 1:,} (context {context:,} and a target)",
                    "Use more text, a smaller task_options.context, or another eval_fraction.",
                )

    def describe(self) -> str:
        """Return a description of the text that was found."""
        distinct = f", {self._tokens.vocabulary} distinct ones" if self._level == "characters" else ""
        windows = f"windows of {self._context}: {len(self._train):,} to train on"
        if self._eval is not None:
            windows += f", {len(self._eval):,} to evaluate"
        return f"{len(self._tokens):,} {self._level} of {self._name}{distinct}, in {windows}"

    def train_data(self) -> Windows:
        """Return the training data: inputs (context,), the tokens; targets, the token after each."""
        return self._train

    def eval_data(self) -> Windows | None:
        """Return the evaluation data: consecutive windows; an incomplete last one is left out."""
        return self._eval

    def _built_in(self) -> tuple[Any, dict[str, Any]]:
        return gpt, {"vocabulary": self._tokens.vocabulary, "context": self._context, **self._sizes}


task = Text
