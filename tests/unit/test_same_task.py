"""Whether a job's task and options are those of a checkpoint: config.yaml has other paths for them."""

import json
from types import SimpleNamespace

import pytest
import yaml

from hvdtrain.config import Config
from hvdtrain.jobs.opening.data_identity import same_field
from hvdtrain.jobs.run_directory.provenance import config_text


def config(**fields) -> Config:
    return Config(**{"framework": "torch", "epochs": 1, **fields})


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run directory of a run that was started in the folder ``first``."""
    folder = tmp_path / "first"
    (folder / "images").mkdir(parents=True)
    (folder / "run").mkdir()
    (folder / "run" / "provenance.jsonl").write_text(json.dumps({"folder": str(folder)}) + "\n")
    monkeypatch.chdir(folder)
    return folder / "run"


def checkpoint(run, given: Config) -> SimpleNamespace:
    manifest = SimpleNamespace(config=given.model_dump(mode="json"))
    return SimpleNamespace(path=run / "checkpoints" / "step-00000003", manifest=manifest)


@pytest.mark.parametrize(
    "fields",
    [
        {"task": "images", "task_options": {"path": "images", "model": "images"}},
        {"task": "mine.py:Mine"},
        {"task": "sub/../mine.py:Mine"},
        {"task": "package.mine:Mine", "task_options": {"path": "images"}},
    ],
)
@pytest.mark.parametrize("from_elsewhere", [False, True])
def test_what_config_yaml_says_is_what_the_checkpoint_has(run, tmp_path, monkeypatch, fields, from_elsewhere):
    given = config(**fields)
    found = checkpoint(run, given)
    written = Config(**yaml.safe_load(config_text(given, run)))
    if from_elsewhere:
        monkeypatch.chdir(tmp_path)
    now = written.model_dump(mode="json")
    assert [name for name in now if not same_field(name, found, now)] == []


@pytest.mark.parametrize(
    ("fields", "differs"),
    [
        ({"task": "images", "task_options": {"path": "/other/images"}}, "task_options"),
        ({"task": "images", "task_options": {"path": "images", "model": "b"}}, "task_options"),
        ({"task": "/other/mine.py:Mine"}, "task"),
        ({"task": "text", "task_options": {"path": "images"}}, "task"),
    ],
)
def test_other_paths_and_other_options_differ(run, fields, differs):
    is_task = differs == "task"
    before = {"task": "mine.py:Mine"} if is_task and "mine" in fields["task"] else {"task": "images"}
    found = checkpoint(run, config(**{**before, "task_options": {"path": "images"}}))
    assert not same_field(differs, found, config(**fields).model_dump(mode="json"))
