"""What cannot be combined is refused: each row of the table, and none of its features alone."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.documents import ROOT

from hvdtrain.config import Config, Layer
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.jobs.compatibility import FIXED_SETTINGS, ROWS, Job, Row, check
from hvdtrain.jobs.opening.start import settle

OPTIONS = {
    "warmup_epochs": 1.5, "steps": 20, "max_time": "2h", "outer_optimizer": "nesterov", "stage_cuts": [1],
    "compile": True, "sync_batch_norm": True, "compression": "fp16", "sync_every": 4, "shard": "optimizer",
    "stages": 2, "accumulate": 2, "parameter_groups": [{"match": "*"}], "early_stopping": "loss",
    "keep_best": "loss", "overlap": True, "label_smoothing": 0.1, "global_batch_size": 64,
}  # fmt: skip
ENDLESS = SimpleNamespace(length=None)
# for each feature of the table, by its name in the documentation: a job that has it
EXAMPLES: dict[str, dict[str, Any]] = {
    "a warm-up": {"warmup_steps": 9, "warmup_epochs": 1.5},
    "`init_only` or `init_skip`": {"init_skip": "*"},
    "`profile` of later steps": {"profile": "30-40", "steps": 20},
    "`compile` in TensorFlow": {"compile": True, "framework": "tf"},
    "`compression` powersgd": {"compression": "powersgd:2"},
    "a loss of the task's own that calls the model": {"task": {"torch_loss": "a method"}},
    "`mixup` or `cutmix`": {"cutmix": 0.2},
    "`global_batch_size` in an elastic job": {"global_batch_size": 64, "is_elastic": True},
    "an elastic job": {"is_elastic": True},
    "more than 256 workers": {"most": 257},
    "reductions by NCCL": {"uses_nccl": True},
    "`lr_schedule` task": {"lr_schedule": "task", "task": {"loss": "mse"}},
    "`lr_schedule` step or cyclic or cosine_restarts or task": {"lr_schedule": "cyclic"},
    "`epochs`": {"epochs": 2, "steps": None},
    "a URL as `run_dir`": {"run_dir": "s3://bucket/run"},
    "data that are a stream": {"streams": {"evaluation data": SimpleNamespace(length=5)}},
    "training data that are a stream": {"streams": {"training data": SimpleNamespace(length=5)}},
    "training data that are a stream without `length`": {"streams": {"training data": ENDLESS}, "steps": 5},
    "evaluation data": {"has_eval_data": False},
    "Gloo": {"controller": "Gloo"},
    "a training step of the task's own": {"task": {"torch_step": "a method"}},
    "an optimizer of the task's own": {"task": {"torch_optimizer": "a method"}},
    **{f"`{name}`": {"environ": name} for name in FIXED_SETTINGS},
    **{f"`{name}`": {name: value} for name, value in OPTIONS.items()},
}
for feature in (feature for row in ROWS for feature in (row.feature, row.other)):
    if feature.name not in EXAMPLES and feature.joined != "without":
        # a command, or one of some values of an option
        word, value = re.match(r"`(.+?)` ?(\S*)", feature.name).groups()
        is_option = word in Config.model_fields
        EXAMPLES[feature.name] = yaml.safe_load(f"{word}: {value}") if is_option else {"command": word}


def job(monkeypatch: pytest.MonkeyPatch, *features: dict[str, Any]) -> Job:
    """Return a job with all of these features."""
    given = {key: value for feature in features for key, value in feature.items()}
    of_workers = {"is_elastic": False, "most": 2, "controller": "MPI"}
    workers = SimpleNamespace(host="alpha", **{key: given.pop(key, of_workers[key]) for key in of_workers})
    if name := given.pop("environ", ""):
        monkeypatch.setenv(name, "1")
    known = {key: given.pop(key) for key in {"uses_nccl", "streams", "has_eval_data", "command"} & {*given}}
    task = SimpleNamespace(**members) if (members := given.pop("task", {})) else None
    return Job(Config(**{"framework": "torch", **given}), task, workers, **known)


def refusal(made: Job) -> HvdtrainError | None:
    """Return the error of a job; None if it has none."""
    try:
        check(made)
    except HvdtrainError as error:
        return error
    return None


def without(row: Row) -> bool:
    """Return whether a row is of an option that needs the other one."""
    return row.other.joined == "without" and row.other.name != "evaluation data"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.feature.name} {row.other.name}")
def test_each_row_is_refused_and_names_both_features(monkeypatch, row):
    other = {} if without(row) else EXAMPLES[row.other.name]
    made = job(monkeypatch, EXAMPLES[row.feature.name], other)
    error = refusal(made)
    assert type(error) is row.kind
    one, two = row.feature.describe(made), row.other.describe(made)
    assert error.problem == f"{one} cannot be used {row.other.joined} {two}: {row.reason}"
    assert error.remedy == made.describe(row.remedy)


NEEDED = {row.feature.name for row in ROWS if without(row)}
ALONE = [name for name in EXAMPLES if name not in NEEDED and name != "`profile` of later steps"]


@pytest.mark.parametrize("name", ALONE)
def test_one_feature_alone_is_not_refused(monkeypatch, name):
    assert refusal(job(monkeypatch, EXAMPLES[name])) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"lr_schedule": "inverse_sqrt", "warmup_steps": 9},
        {"lr_schedule": "task", "task": {"learning_rate_factor": "a method"}},
        {"lr_schedule": "one_cycle", "warmup_epochs": 1.5, "warmup_steps": 0},
        {"is_elastic": True, "compression": "fp16", "most": 256},
        {"shard": "optimizer", "task": {"tf_optimizer": "a method"}},
    ],
    ids=str,
)
def test_what_can_be_combined_is_not_refused(monkeypatch, fields):
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "0")
    monkeypatch.setenv("HOROVOD_HIERARCHICAL_ALLGATHER", "")
    assert refusal(job(monkeypatch, fields)) is None


def test_a_config_is_refused_before_anything_is_started():
    layer = Layer("options", {"framework": "torch", "shard": "optimizer", "sync_every": 4})
    with pytest.raises(ConfigError, match="shard optimizer cannot be used with sync_every 4") as caught:
        settle([layer])
    assert not caught.value.everywhere  # workers may have been given different configs


def test_the_documentation_has_the_table():
    lines = ["| feature | cannot be used | because |", "|---|---|---|"]
    for row in ROWS:
        line = f"| {row.feature.name} | {row.other.joined} {row.other.name} | {row.reason} |"
        lines.append(line.replace("  ", " "))
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in text, "the table should be:\n" + "\n".join(lines)
