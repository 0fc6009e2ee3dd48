"""The trackers that a run can be sent to: the values of the config field ``track``."""

from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

from hvdtrain.errors import ConfigError

PLAIN = ("none", "fp16", "bf16")  # ways without a rank
LOW_RANK = "powersgd"
MAX_RANK = 32


def check_compression(value: object) -> str:
    """Return a value of the field as it is.

    Raises:
        ValueError: naming the values that there are.
    """
    if isinstance(value, str) and (value in PLAIN or rank_of(value) is not None):
        return value
    if isinstance(value, str) and value.partition(":")[0] == LOW_RANK:
        raise ValueError(f"{LOW_RANK} takes a rank from 1 to {MAX_RANK}, such as {LOW_RANK}:4")
    raise ValueError(f"should be {', '.join(map(repr, PLAIN))} or '{LOW_RANK}:RANK', such as {LOW_RANK}:4")


def rank_of(compression: str) -> int | None:
    """Return the rank of PowerSGD; None if gradients travel in another way."""
    name, _, rank = compression.partition(":")
    if name != LOW_RANK or not (rank.isascii() and rank.isdecimal()) or rank.startswith("0"):
        return None
    return int(rank) if len(rank) <= len(str(MAX_RANK)) and int(rank) <= MAX_RANK else None


@dataclass(frozen=True)
class ExportFormat:
    """A format to export in.

    Attributes:
        framework: the framework whose model is written.
        suffix: ending of the file's name; empty for a directory.
        packages: what it takes beside the framework.
        loading: a line of Python that loads it and, if it is a program, calls it. {path} stands for the
            file, {arguments}, {keywords} and {mapping} for the inputs.
    """

    framework: str
    suffix: str
    packages: tuple[str, ...]
    loading: str


EXPORT_FORMATS = {
    "safetensors": ExportFormat(
        "torch",
        ".safetensors",
        ("safetensors",),
        'model.load_state_dict(safetensors.torch.load_file("{path}"))',
    ),
    "pt": ExportFormat("torch", ".pt", (), 'model.load_state_dict(torch.load("{path}", weights_only=True))'),
    "torch-export": ExportFormat("torch", ".pt2", (), 'torch.export.load("{path}").module()({arguments})'),
    "onnx": ExportFormat(
        "torch",
        ".onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        'onnxruntime.InferenceSession("{path}").run(None, {{{mapping}}})',
    ),
    "keras": ExportFormat("tf", ".keras", (), 'keras.models.load_model("{path}")'),
    "saved-model": ExportFormat(
        "tf", "", (), 'tf.saved_model.load("{path}").signatures["serving_default"]({keywords})'
    ),
}


class TrackerRow(NamedTuple):
    """A tracker's name in messages, the package and extra that it needs, and whether it is sent anything."""

    title: str
    package: str
    has_sender: bool = True


TRACKERS = {
    "mlflow": TrackerRow("MLflow", "mlflow"),
    "wandb": TrackerRow("Weights & Biases", "wandb"),
    "tensorboard": TrackerRow("TensorBoard", "", has_sender=False),
}


def split_trackers(value: object) -> object:
    """Return a list of names; one text may name several, with commas between them.

    Raises:
        ValueError: naming a tracker that there is not, or that is named twice.
    """
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return value  # pydantic says what is wrong
    names = tuple(name.strip() for text in texts for name in text.split(",") if name.strip())
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"there is no tracker {name!r}; there are {', '.join(TRACKERS)}")
    return tuple(dict.fromkeys(names))


def senders(names: Collection[str]) -> list[str]:
    """Return those trackers that are sent what a run logs."""
    return [name for name in names if TRACKERS[name].has_sender]


def check_installed(names: Collection[str]) -> None:
    """Check that the packages of trackers are installed, without loading them.

    Raises:
        ConfigError: naming the first one that is not, and how to install it.
    """
    for name in names:
        row = TRACKERS[name]
        found = find_spec(row.package) if row.package else None
        # a folder of that name, such as W&B's own, is found without an origin
        if row.package and (found is None or found.origin is None):
            raise ConfigError(
                f"track {name}: the package {row.package} is not installed",
                f"python -m pip install 'hvdtrain[{row.package}]', on each host of the job. Or leave it out, "
                f"and send the run later: python -m hvdtrain track RUN --to {name}",
            )
