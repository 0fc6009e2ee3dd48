"""The configuration of a job: fields, rules, and who wins where several sources set one.

Precedence, weakest first: field defaults, the task's ``defaults``, the YAML file, ``--set``,
options. A later source also settles either-or questions: ``--steps`` on the command line
displaces ``epochs`` from the file.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from hvdtrain.best import Best
from hvdtrain.errors import ConfigError
from hvdtrain.schedule import Cadence

BestField = Annotated[Best, BeforeValidator(Best.parse), PlainSerializer(str)]
EveryField = Annotated[Cadence, BeforeValidator(Cadence.parse), PlainSerializer(str)]

# setting one of a pair in a stronger source displaces the other from weaker ones
EITHER_OR = (("epochs", "steps"), ("batch_size", "global_batch_size"))


class Config(BaseModel):
    """Everything that decides what a job computes. Frozen; valid once it exists.

    Counts are samples unless the name says otherwise; "epoch" means one pass over the training
    data. The descriptions are the help texts of the command line and the table in docs/config.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    framework: Literal["torch", "tf"] = Field(description="Which backend trains: PyTorch or TensorFlow.")
    task: str = Field("digits", description="Built-in task, package.module:Task or path/to/file.py:Task.")
    task_options: dict[str, Any] = Field({}, description="Keyword arguments of the task's constructor.")

    epochs: float | None = Field(None, gt=0, description="Length of training in epochs (10 if not given).")
    steps: int | None = Field(None, gt=0, description="Length of training in steps, instead of epochs.")
    batch_size: int = Field(32, gt=0, description="Samples per worker and micro-batch.")
    global_batch_size: int | None = Field(
        None, gt=0, description="Samples per step on all workers together, instead of --batch-size."
    )
    accumulate: int = Field(1, gt=0, description="Micro-batches per worker and step.")
    eval_batch_size: int | None = Field(
        None, gt=0, description="Samples per worker and batch of evaluation (that of training if not given)."
    )

    learning_rate: float = Field(0.01, gt=0, description="Learning rate for base_batch_size samples.")
    lr_scaling: Literal["linear", "sqrt", "none"] = Field(
        "linear", description="How the learning rate grows with the global batch."
    )
    base_batch_size: int | None = Field(
        None,
        gt=0,
        description="Batch that the learning rate is quoted for (one worker's share of a step, or the "
        "global batch where --global-batch-size is given).",
    )
    lr_schedule: Literal["constant", "cosine", "step", "cyclic"] = Field(
        "constant", description="Learning rate after the warm-up."
    )
    warmup_epochs: float = Field(0.0, ge=0, description="Length of the linear warm-up, in epochs.")
    lr_final_fraction: float = Field(
        0.0, ge=0, le=1, description="Lowest learning rate of cosine and cyclic, as a fraction of the peak."
    )
    lr_step_epochs: tuple[float, ...] = Field((), description="Where schedule step drops, in epochs.")
    lr_step_factor: float = Field(0.1, gt=0, description="What schedule step multiplies by at each drop.")
    lr_cycle_epochs: float = Field(
        2.0, gt=0, description="Length of one cycle of schedule cyclic, in epochs."
    )

    optimizer: Literal["sgd", "adamw", "lars", "lamb"] = Field(
        "sgd", description="Optimizer: sgd and adamw by PyTorch's formulas; lars and lamb for large batches."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of sgd and lars.")
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay: L2 for sgd and lars, decoupled for adamw and lamb."
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="First-moment decay of adamw and lamb.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Second-moment decay of adamw and lamb.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Epsilon of adamw and lamb.")
    lars_trust_coefficient: float = Field(
        0.001, gt=0, description="How far lars moves a tensor at learning rate 1, as a part of its norm."
    )
    clip_norm: float | None = Field(None, gt=0, description="Largest norm of the averaged gradient.")
    compression: Literal["none", "fp16"] = Field("none", description="How gradients travel.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Part of the target that loss cross_entropy spreads over all classes."
    )
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Evaluate and export a moving average of the weights, of this decay per step.",
    )
    early_stopping: BestField | None = Field(
        None, description="Stop when this metric of the evaluation gets no better; as keep_best."
    )
    early_stopping_patience: int = Field(
        3, gt=0, description="Evaluations in a row without an improvement that early_stopping waits for."
    )

    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="What the model computes in; its weights stay fp32."
    )
    sync_batch_norm: bool = Field(
        False, description="Let batch norm see the global batch instead of each worker's part."
    )
    checkpoint_activations: bool = Field(
        False, description="Compute the activations of repeated blocks again instead of keeping them."
    )
    compile: bool = Field(False, description="Compile the model: torch.compile, or XLA in TensorFlow.")

    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="Where to compute.")
    threads: int | None = Field(
        None, gt=0, description="Compute threads per worker (its share of the host's cores if not given)."
    )
    read_threads: int = Field(2, gt=0, description="Threads per worker that read samples ahead.")
    read_workers: int = Field(
        0, ge=0, description="Processes per worker that read samples ahead; 0: its threads do."
    )
    on_bad_sample: Literal["error", "skip"] = Field(
        "error", description="What to do with a sample that cannot be read; skip: count it and go on."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of everything random.")
    initial_parameters: Literal["model", "portable"] = Field(
        "model",
        description="Initial values: as the model was built, or drawn by name, equal in both frameworks.",
    )

    run_dir: str | None = Field(
        None, description="Where the run is written (runs/TASK-FRAMEWORK-TIME if not given)."
    )
    resume: str | None = Field(
        None,
        description="Go on from a checkpoint: auto for the newest good one in --run-dir (from the start if "
        "there is none), or a checkpoint's or a run's directory.",
    )
    init: str | None = Field(
        None, description="Checkpoint or run directory to take the weights from, without its progress."
    )
    save_every: EveryField | None = Field(
        Cadence(1.0, "epochs"), description="How often to save; always at the end. null for then only."
    )
    keep_last: int | None = Field(
        3, gt=0, description="How many of the newest checkpoints to keep. null for all."
    )
    keep_best: BestField | None = Field(
        None,
        description="Metric of the evaluation whose best checkpoint is saved and kept as well; NAME:min or "
        "NAME:max where the name does not tell which is best.",
    )
    on_save_error: Literal["warn", "stop"] = Field(
        "warn", description="What to do when a checkpoint cannot be written; warn: go on and try again later."
    )
    log_every: EveryField = Field(Cadence(10), description="How often metrics are logged.")
    eval_every: EveryField | None = Field(
        Cadence(1.0, "epochs"), description="How often to evaluate; always at the end. null for then only."
    )
    check_replicas_every: int = Field(
        1000, gt=0, description="Steps between comparisons of the workers' parameters."
    )
    trace_indices: bool = Field(
        False, description="Write the indices that every worker trains on to RUN_DIR/indices/."
    )

    @model_validator(mode="after")
    def _check(self) -> "Config":
        if self.lr_schedule == "step" and not self.lr_step_epochs:
            raise ValueError("lr_schedule step needs lr_step_epochs, such as [30, 60, 80]")
        drops = list(self.lr_step_epochs)
        if drops != sorted(drops) or any(epoch < 0 for epoch in drops):
            raise ValueError(f"lr_step_epochs must ascend from 0 or more, found {drops}")
        if self.resume == "auto" and self.run_dir is None:
            raise ValueError("resume: auto looks in the run directory, so give --run-dir, too")
        if self.framework == "tf" and self.compile and self.sync_batch_norm:
            raise ValueError(
                "compile: XLA has no messages between workers, so leave out compile or sync_batch_norm"
            )
        return self

    def to_yaml(self) -> str:
        """Give the configuration as YAML that repeats the run, from its start and in another directory."""
        displaced = {"batch_size"} if self.global_batch_size else set()
        # null, too, must be there: where the task's defaults set a field, null is what takes it back
        values = self.model_dump(exclude={"run_dir", "resume"} | displaced, mode="json")
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class Layer:
    """Field values from one source.

    Args:
        source: where they come from, as messages name it: "--set", "run.yaml".
        values: field name to value.
    """

    source: str
    values: Mapping[str, Any]


def resolve(layers: Iterable[Layer]) -> Config:
    """Merge layers, weakest first, into a valid Config.

    Raises:
        ConfigError: one line per offence, naming the field, the rule, the value and its source.
    """
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        _check_names(layer)
        for one, other in EITHER_OR:
            given = [field for field in (one, other) if layer.values.get(field) is not None]
            if len(given) == 2:
                raise ConfigError(
                    f"{layer.source} sets both {one} and {other}", f"Give one of the two: {one} or {other}."
                )
            if given:
                merged.pop(other if given == [one] else one, None)
        for field, value in layer.values.items():
            merged[field] = _merged(merged.get(field), value)
            sources[field] = layer.source
    if merged.get("framework") is None:
        raise ConfigError("no framework is given", "Add --framework torch or --framework tf.")
    if merged.get("epochs") is None and merged.get("steps") is None:
        merged["epochs"] = 10.0
    try:
        return Config(**merged)
    except ValidationError as error:
        raise ConfigError("\n".join(_in_words(detail, sources) for detail in error.errors())) from None


def _merged(weaker: Any, stronger: Any) -> Any:
    """Give the stronger value; of two mappings, the keys of both, at any depth."""
    if not (isinstance(weaker, Mapping) and isinstance(stronger, Mapping)):
        return stronger
    return {**weaker, **{key: _merged(weaker.get(key), value) for key, value in stronger.items()}}


def _check_names(layer: Layer) -> None:
    for name in layer.values:
        if name not in Config.model_fields:
            close = difflib.get_close_matches(str(name).replace("-", "_"), Config.model_fields, n=1)
            raise ConfigError(
                f"{layer.source}: there is no field {name!r}",
                f"Did you mean {close[0]!r}?" if close else "docs/config.md lists every field.",
            )


def _in_words(detail: Any, sources: Mapping[str, str]) -> str:
    """Say one pydantic error as "field: rule, found value (source)"."""
    rule = re.sub(r"^(Value error, |Input )", "", detail["msg"])
    if not detail["loc"]:
        return rule
    field = str(detail["loc"][0])
    where = ".".join(str(part) for part in detail["loc"])
    return f"{where}: {rule}, found {detail['input']!r} ({sources.get(field, 'default')})"


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number, as in YAML 1.2 (version 1.1 reads it as text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, source: str) -> Any:
    """Read YAML; nothing in it can run code.

    Raises:
        ConfigError: naming the source, line and column.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source} is not valid YAML{place}: {getattr(error, 'problem', error)}") from None


def read_file(path: Path) -> Layer:
    """Read a YAML config file.

    Raises:
        ConfigError: where it cannot be read, is not YAML or holds no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from None
    values = parse_yaml(text, str(path))
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold field: value lines, found a {type(values).__name__}")
    return Layer(str(path), values)


def parse_assignments(assignments: Iterable[str]) -> Layer:
    """Read ``KEY=VALUE`` texts as --set takes them; a dotted key reaches into a mapping.

    Raises:
        ConfigError: where one has no "=" or its value is not YAML.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {assignment}: must be KEY=VALUE, such as --set seed=1")
        field, *inner = key.strip().split(".")
        value = parse_yaml(text, f"--set {key}")
        for name in reversed(inner):
            value = {name: value}
        values[field] = _merged(values.get(field), value) if inner else value
    return Layer("--set", values)
