"""The values of config fields: their types, and tables of compression, formats of exports, trackers."""

import os
import re
from collections.abc import Collection
from importlib.util import find_spec
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import ConfigError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.schedule import Cadence, StepWindow
from hvdtrain.storage.files import check_url, expand_path, expand_task
from hvdtrain.storage.urls import READ_ONLY, is_url, scheme_of, shown


class Compression(NamedTuple):
    """How gradients travel."""

    reducer: str  # what sums them: a module of the folder ``reduction/`` of each framework, and its class
    number_bytes: int = 4  # of a number of fp32 as it travels
    # type in which each worker gets its part of them (``shard gradients``); empty if the whole gradient is
    # needed
    parts_as: str = ""
    has_rank: bool = False  # whether a rank of PowerSGD stands behind its name, after a colon
    keeps: str = ""  # its name in messages if it keeps something from step to step


# how gradients can travel: another way is a row here, and a class in each framework's folder
COMPRESSIONS = {
    "none": Compression("all_reduce.AllReduce", 4, "float32"),
    "fp16": Compression("all_reduce.Fp16", 2, "float16"),
    "bf16": Compression("all_reduce.BFloat16", 2, "bfloat16"),
    "powersgd": Compression("low_rank.LowRank", has_rank=True, keeps="PowerSGD"),
}
MAX_RANK = 32


def check_compression(value: object) -> str:
    """Return a value of the field as it is."""
    plain = [name for name, row in COMPRESSIONS.items() if not row.has_rank]
    if isinstance(value, str) and (value in plain or rank_of(value) is not None):
        return value
    if str(value).partition(":")[0] == "powersgd":
        raise ValueError(f"powersgd takes a rank from 1 to {MAX_RANK}, such as powersgd:4")
    raise ValueError(f"should be {', '.join(map(repr, plain))} or 'powersgd:RANK', such as powersgd:4")


def compression_of(compression: str) -> Compression:
    """Return the row of a value of the field."""
    return COMPRESSIONS.get(compression.partition(":")[0], COMPRESSIONS["none"])


def rank_of(compression: str) -> int | None:
    """Return the rank of a compression to low rank; None if gradients travel in another way."""
    _, _, rank = compression.partition(":")
    is_rank = compression_of(compression).has_rank and re.fullmatch("[1-9][0-9]?", rank)
    return int(rank) if is_rank and int(rank) <= MAX_RANK else None


class ExportFormat(NamedTuple):
    """A format to export in."""

    framework: str  # the framework whose model is written
    suffix: str  # ending of the file's name; empty for a directory
    # a line of Python that loads it and, if it is a program, calls it. {path} stands for the file,
    # {arguments}, {keywords} and {mapping} for the inputs
    loading: str
    packages: tuple[str, ...] = ()  # what it takes in addition to the framework


_SAFETENSORS = 'model.load_state_dict(safetensors.torch.load_file("{path}"))'
_ONNX = 'onnxruntime.InferenceSession("{path}").run(None, {{{mapping}}})'
_SIGNATURE = 'tf.saved_model.load("{path}").signatures["serving_default"]({keywords})'
EXPORT_FORMATS = {
    "safetensors": ExportFormat("torch", ".safetensors", _SAFETENSORS, ("safetensors",)),
    "pt": ExportFormat("torch", ".pt", 'model.load_state_dict(torch.load("{path}", weights_only=True))'),
    "torch-export": ExportFormat("torch", ".pt2", 'torch.export.load("{path}").module()({arguments})'),
    "onnx": ExportFormat("torch", ".onnx", _ONNX, ("onnx", "onnxscript", "onnxruntime")),
    "keras": ExportFormat("tf", ".keras", 'keras.models.load_model("{path}")'),
    "saved-model": ExportFormat("tf", "", _SIGNATURE),
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
    """Return a list of names; one text may name several, with commas between them."""
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
    """Check that the packages of trackers are installed, without loading them."""
    for name in names:
        row = TRACKERS[name]
        found = find_spec(row.package) if row.package else None
        # a folder of that name, such as W&B's own, is found without an origin
        if row.package and (found is None or found.origin is None):
            raise ConfigError(
                f"track {name}: the package {row.package} is not installed",
                f"python -m pip install {row.package}, on each host of the job. Or leave it out, "
                f"and send the run later: python -m hvdtrain track RUN --to {name}",
            )


def _known_framework(value: object) -> object:
    if not isinstance(value, str) or value not in FRAMEWORKS:
        raise ValueError(f"should be {' or '.join(map(repr, FRAMEWORKS))}")
    return value


_TIME = re.compile(r"(?:(\d+(?:\.\d*)?)d)?(?:(\d+(?:\.\d*)?)h)?(?:(\d+(?:\.\d*)?)m)?(?:(\d+(?:\.\d*)?)s?)?")


def _seconds_of(value: object) -> object:
    """Return the seconds of a time such as ``1d12h``, ``90m`` or ``30``, which are seconds."""
    if not isinstance(value, str):
        return value
    if (match := _TIME.fullmatch(value.replace(" ", ""))) is None or not any(match.groups()):
        raise ValueError("must be a time such as 30m, 2h or 1d12h, or a number of seconds")
    units = (86400, 3600, 60, 1)
    return sum(float(part or 0) * unit for part, unit in zip(match.groups(), units, strict=True))


TimeField = Annotated[float, BeforeValidator(_seconds_of), Field(gt=0, le=10**9)]
MetricGoalField = Annotated[MetricGoal, BeforeValidator(MetricGoal.parse), PlainSerializer(str)]
FrameworkField = Annotated[str, BeforeValidator(_known_framework)]
# one text is a list of one pattern
Patterns = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
]
StepsField = Annotated[StepWindow, BeforeValidator(StepWindow.parse), PlainSerializer(str)]
EveryField = Annotated[Cadence, BeforeValidator(Cadence.parse), PlainSerializer(str)]
TrackersField = Annotated[
    tuple[Literal["mlflow", "wandb", "tensorboard"], ...], BeforeValidator(split_trackers)
]
CompressionField = Annotated[str, BeforeValidator(check_compression)]
# YAML reads true and false as such
OverlapField = Annotated[Literal["auto", "true", "false"], BeforeValidator(lambda value: str(value).lower())]


class ParameterGroup(BaseModel):
    """Options of the parameters whose portable names match a pattern."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    match: str = Field(min_length=1)
    learning_rate_factor: float = Field(1.0, gt=0)
    weight_decay: float | None = Field(None, ge=0)
    frozen: bool = False


def expand_place(name: str, value: object) -> object:
    """Return the value of a field that names a task, a path or a URL, with ``~`` and variables expanded."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    if name == "task":
        return expand_task(value)
    path = expand_path(value)
    scheme, inside = scheme_of(path), path.partition("://")[2]
    if name == "run_dir" and inside and scheme in ("memory", *READ_ONLY):
        raise ValueError(f"{shown(path)}: {scheme}:// keeps nothing that is written")
    if not is_url(path):
        return path
    url = check_url(path)
    if shown(url) != url:
        raise ValueError(f"{shown(url)} has a signature in it, which would be written to config.yaml")
    return url
