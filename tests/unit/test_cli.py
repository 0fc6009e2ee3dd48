"""The command line: its options, its layers, its errors, and how little it loads."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from hvdtrain import cli
from hvdtrain.cli.jobs import OPTIONS
from hvdtrain.config import Config, Layer
from hvdtrain.config.layers import resolve
from hvdtrain.errors import UsageError
from hvdtrain.jobs import train as job

HEAVY = {"torch", "tensorflow", "keras", "horovod", "mpi4py"}


@pytest.fixture
def invoke():
    """Runs the command line in this process."""
    return lambda *words: CliRunner().invoke(cli.cli, list(words), prog_name="hvdtrain")


@pytest.fixture
def layers(monkeypatch, invoke):
    """Gives the layers that a command line hands on, without running the job."""

    def get(*words: str) -> list[Layer]:
        handed_on: list[list[Layer]] = []
        monkeypatch.setattr(job, "run_job", lambda layers, best: handed_on.append(layers))
        result = invoke(*words)
        assert result.exit_code == 0, result.output
        return handed_on[0]

    return get


def test_layers_come_weakest_first(layers, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\nmomentum: 0.1\nepochs: 1\n")
    found = layers(str(path), "--framework=torch", "--seed=3", "--set=seed=2", "--set=momentum=0.2")
    assert [layer.source for layer in found] == [str(path), "--set", "options"]
    config = resolve(found)
    assert (config.seed, config.momentum, config.epochs) == (3, 0.2, 1)


def test_resume_alone_takes_the_newest_of_the_run_directory(layers):
    assert layers("--resume=runs/x")[-1].values == {"resume": "runs/x"}
    assert layers("--resume", "--seed", "3")[-1].values == {"resume": "auto", "seed": 3}


FLAGS = {name for name in OPTIONS if Config.model_fields[name].annotation is bool}


@pytest.mark.parametrize("name", sorted(FLAGS))
@pytest.mark.parametrize(("prefix", "value"), [("--", True), ("--no-", False)])
def test_every_flag_reaches_its_field_and_can_be_taken_back(layers, name, prefix, value):
    assert layers(f"{prefix}{name.replace('_', '-')}")[-1].values == {name: value}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in FLAGS])
def test_every_option_reaches_its_field(layers, name):
    given = {"framework": "tf", "lr_scaling": "sqrt", "lr_schedule": "cyclic", "optimizer": "adamw",
             "compression": "fp16", "device": "cpu", "task": "t", "run_dir": "r", "log_every": "2epoch",
             "eval_every": "5", "save_every": "0.5epoch", "keep_best": "loss:min", "on_save_error": "stop",
             "momentum": "0.5", "label_smoothing": "0.5", "mixup": "0.5", "cutmix": "0.5",
             "ema_decay": "0.5", "precision": "bf16",
             "early_stopping": "loss:min", "on_bad_sample": "skip", "outer_optimizer": "average",
             "outer_momentum": "0.5", "stall_timeout": "60",
             "on_changed_data": "warn", "track": "wandb", "overlap": "true",
             "shard": "optimizer"}.get(name, "3")  # fmt: skip
    values = layers(f"--{name.replace('_', '-')}", given)[-1].values
    assert list(values) == [name]
    config = resolve([Layer("rest", {"framework": "torch", "init": "w"}), Layer("options", values)])
    assert str(getattr(config, name)) in (given, f"{given}.0", f"('{given}',)")


def test_a_word_that_is_no_command_and_no_file_is_named():
    with pytest.raises(UsageError, match="'qqq' is neither a command nor a config file\nCommands: train, "):
        cli.cli(["qqq"], standalone_mode=False)


def test_a_wrong_value_names_the_right_ones_and_every_unknown_option_has_a_hint(invoke):
    result = invoke("--optimizer", "adam")
    assert (result.exit_code, "'adam' is not one of 'sgd', 'adamw'" in result.output) == (2, True)
    result = invoke("--lr", "0.1", "--wd=3", "--max-epochs", "3", "--threads", "2", "--zzzz")
    assert result.exit_code == 2
    assert result.output.splitlines()[-5:] == [
        "Error: No such option '--lr'. Did you mean '--learning-rate'?",
        "No such option '--wd'. Did you mean '--weight-decay'?",
        "No such option '--max-epochs'. Did you mean '--epochs'?",
        "No such option '--threads'. Did you mean '--set threads=VALUE'?",
        "No such option '--zzzz'.",
    ]


def loaded_by(*words: str) -> set[str]:
    """Give the modules that a Python command loads."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *words], capture_output=True, text=True, timeout=300, check=True
    )
    modules = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "hvdtrain" in modules
    return modules


def test_neither_help_nor_a_job_that_does_not_know_which_loads_a_framework():
    of_import = loaded_by("-c", "import hvdtrain")
    assert not [name for name in of_import if name == "numpy" or name.startswith("hvdtrain.")]
    assert loaded_by("-m", "hvdtrain", "--help") & (HEAVY | {"numpy", "tensorboard", "sklearn"}) == set()
    code = "import hvdtrain.jobs.train, hvdtrain.jobs.serving.inference, hvdtrain.jobs.serving.models"
    assert loaded_by("-c", code) & HEAVY == set()


def test_pages_of_the_documentation_are_listed_and_shown(invoke):
    assert "tutorial        Tutorial" in invoke("docs").output
    assert invoke("docs", "docs/prove.md").output.startswith("# Prove")
    unknown = invoke("docs", "prov")
    assert isinstance(unknown.exception, UsageError)
    assert "'prove'" in unknown.exception.remedy
