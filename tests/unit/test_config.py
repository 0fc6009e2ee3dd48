"""The configuration: who wins, which rules hold, what a message says, what is written and read."""

from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from hvdtrain.config import Config, Layer
from hvdtrain.config.layers import parse_assignments, read_file, resolve
from hvdtrain.config.train_options import TrainOptions
from hvdtrain.config.yaml_reader import parse_yaml
from hvdtrain.errors import ConfigError

TORCH = Layer("options", {"framework": "torch"})


def resolved(**fields: object) -> Config:
    return resolve([TORCH, Layer("options", fields)])


def refused(layer: Layer) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve([TORCH, layer])
    return str(caught.value)


@pytest.mark.parametrize(
    ("weaker", "stronger", "left"),
    [
        ({"seed": 1}, {"seed": 2}, {"seed": 2}),
        ({"epochs": 3}, {"steps": 7}, {"epochs": None, "steps": 7}),
        ({"global_batch_size": 48}, {"batch_size": 8}, {"batch_size": 8, "global_batch_size": None}),
        ({"warmup_epochs": 2}, {"warmup_steps": 0}, {"warmup_epochs": 0.0, "warmup_steps": 0}),
    ],
)
def test_the_strongest_source_wins_also_with_the_other_of_a_pair(weaker, stronger, left):
    config = resolve([TORCH, Layer("run.yaml", weaker), Layer("options", stronger)])
    assert {name: getattr(config, name) for name in left} == left


def test_one_source_cannot_set_both_of_a_pair_and_a_framework_must_be_given():
    assert "run.yaml sets both" in refused(Layer("run.yaml", {"epochs": 1, "steps": 2}))
    with pytest.raises(ConfigError, match="no framework is given\nAdd --framework torch or --framework tf"):
        resolve([Layer("options", {"seed": 1})])


def test_task_options_of_all_sources_come_together():
    task = Layer("task", {"task_options": {"model": {"layers": 2, "width": 8}, "path": "a"}})
    layers = [TORCH, task, Layer("run.yaml", {"task_options": {"path": "b"}})]
    config = resolve([*layers, parse_assignments(["task_options.model.width=16"])])
    assert config.task_options == {"model": {"layers": 2, "width": 16}, "path": "b"}


def test_all_wrong_fields_of_all_sources_are_named_at_once():
    given = Layer("run.yaml", {"lr": 1, "seed": 1, "epochs": "three"})
    with pytest.raises(ConfigError) as caught:
        resolve([TORCH, given, Layer("--set", {"gpus": 2, "qqq": 3})])
    lr, gpus, qqq, epochs = caught.value.problem.splitlines()  # unknown fields, and wrong values
    assert lr == "run.yaml: there is no field 'lr'. Did you mean 'learning_rate'?"
    assert gpus.startswith("--set: there is no field 'gpus'. The launcher starts the workers")
    assert qqq == "--set: there is no field 'qqq'"
    assert epochs.endswith("found 'three' (run.yaml)")


def test_home_and_variables_are_expanded_in_the_fields_that_hold_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    fields = {"run_dir": "~/r", "init": "$HOME/i", "resume": Path("~/c"), "task": "~/t.py:T"}
    config = resolved(**fields, task_options={"path": "~/mine"})
    assert {name: getattr(config, name) for name in fields} == {
        "run_dir": "/home/me/r", "init": "/home/me/i", "resume": "/home/me/c", "task": "/home/me/t.py:T",
    }  # fmt: skip
    assert config.task_options == {"path": "~/mine"}


def test_task_options_that_yaml_cannot_hold_are_refused():
    deep: dict = {}
    for _ in range(3000):
        deep = {"a": deep}
    for options in ({"a": {1, object()}}, deep):
        said = refused(Layer("train()", {"task_options": options}))
        assert said.startswith("task_options: cannot be written to config.yaml: ")


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("epochs", float("inf"), "a finite number"),
        ("framework", "jax", "'torch' or 'tf'"),
        ("stall_timeout", 4.9, "at least 5"),
        ("compression", "int8", "powersgd:RANK"),
        ("compression", "powersgd:33", "a rank from 1 to 32"),
        ("profile", "20:24", "steps such as 20-24"),
        ("profile", "24-20", "must not be before the first"),
        ("log_every", "often", "epochs such as 0.5epoch"),
        ("log_every", 0, "greater than 0"),
        ("early_stopping", "accuracy:most", "NAME:min or NAME:max"),
        ("keep_best", ":min", "the name of a metric"),
        ("lr_step_epochs", [3, 2], "ascending order"),
    ],
)
def test_an_offence_names_field_rule_value_and_source(field, value, rule):
    said = refused(Layer("run.yaml", {field: value}))
    assert said.startswith(f"{field}: ")
    assert rule in said
    assert said.endswith(f"found {value!r} (run.yaml)")


def test_values_of_other_trainers_get_a_hint():
    assert refused(Layer("run.yaml", {"clip_norm": "None"})).endswith("; write null for no value")
    assert refused(Layer("run.yaml", {"optimizer": "adam"})).endswith("; adamw with weight_decay 0 is Adam")


def test_yaml_reads_numbers_and_texts_as_its_version_1_2_and_no_key_twice():
    found = parse_yaml("[1e-3, 1:30, 2026-11-28, 0o17, {a: 1e-3}]", "x")
    assert found == [1e-3, "1:30", "2026-11-28", 15, {"a": 1e-3}]
    said = "at line 4, column 3: the key 'b' is given a second time; the first is in line 2"
    with pytest.raises(ConfigError, match=said):
        parse_yaml("a:\n  b: 1\n  c: 2\n  b: 3\n", "run.yaml")


def test_a_config_file_must_hold_fields_and_nothing_in_it_runs_code(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("- seed: 1")
    with pytest.raises(ConfigError, match="must contain lines such as epochs: 3, found a list"):
        read_file(path)
    path.write_text(f"seed: !!python/object/apply:os.mkdir [{tmp_path / 'made'}]\n")
    with pytest.raises(ConfigError, match=f"{path} is not valid YAML at line 1, column 7: "):
        read_file(path)
    assert not (tmp_path / "made").exists()


def test_assignments_read():
    given = ["run_dir=a=b", "task_options={a: 1}", "task_options.m.b=2", "task_options.m.c=3"]
    values = {"run_dir": "a=b", "task_options": {"a": 1, "m": {"b": 2, "c": 3}}}
    assert parse_assignments(given) == Layer("--set", values)
    for assignment in ("seed", "=1"):
        with pytest.raises(ConfigError, match="must be KEY=VALUE"):
            parse_assignments([assignment])


OF_TASK = {"epochs": 15, "batch_size": 16, "clip_norm": 1.0, "base_batch_size": 64, "eval_every": 5}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"save_every": "0.25epoch", "keep_last": 7, "keep_best": "score:min", "on_save_error": "stop"},
        {"learning_rate": 1e-30, "adam_epsilon": 1e22, "seed": 2**63 - 1},
        {"task": "päth/to.py:Täsk", "task_options": {"path": "ü", "sizes": [1, {"a": 1e-9}], "none": None}},
    ],
    ids=str,
)
def test_what_is_written_repeats_the_run(tmp_path, fields):
    """Also over a task whose defaults differ from the config's."""
    task = Layer("task", {**OF_TASK, "threads": 3})
    config = resolve([task, TORCH, Layer("options", fields)])
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert resolve([task, read_file(path)]) == config


def test_where_a_run_lies_and_goes_on_from_is_not_part_of_what_repeats_it():
    written = yaml.safe_load(resolved(run_dir="here", resume="auto", overlap=True).to_yaml())
    assert {"run_dir", "resume"} & set(written) == set()
    assert written["overlap"] == "true"


def test_typed_options_are_the_fields_and_take_their_values():
    """Those of the config but two, which are arguments of their own."""
    typed = TrainOptions.__annotations__
    assert {*typed} == {*Config.model_fields} - {"framework", "task"}
    values = Config(framework="torch").model_dump(mode="json")
    for name, kind in typed.items():
        TypeAdapter(kind).validate_python(values[name])
