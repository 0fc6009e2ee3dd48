"""What a job takes from a checkpoint's manifest: its config, less what was of that training alone."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config, Layer
from hvdtrain.config.layers import resolve
from hvdtrain.errors import CheckpointError, UsageError
from hvdtrain.jobs.opening import checkpoint_config
from hvdtrain.jobs.opening.data_identity import same_field


def manifest(step: int = 3, **fields: object) -> Manifest:
    config = Config(**{"framework": "torch", "epochs": 1, **fields}).model_dump(mode="json")
    return Manifest(step=step, samples=9, data_size=90, seconds=1, workers=2, config=config, versions={})


def resolved(made: Manifest, *given: Layer) -> Config:
    return resolve(checkpoint_config.layers_of(Checkpoint(Path("c"), made), list(given)))


def test_the_config_is_the_checkpoints_and_the_users_options_are_stronger():
    made = manifest(seed=7, precision="bf16", task_options={"split_seed": 3})
    config = resolved(made, Layer("options", {"framework": "tf", "seed": 8}))
    assert (config.framework, config.seed, config.precision) == ("tf", 8, "bf16")
    assert config.task_options == {"split_seed": 3}


def test_what_was_of_that_training_alone_is_left_out():
    left = {"keep_best": "loss", "early_stopping": "loss", "run_dir": "r", "resume": "x", "init": "y"}
    left |= {"label_smoothing": 0.1, "global_batch_size": 9, "accumulate": 3, "compression": "powersgd:4"}
    config = resolved(manifest(**left))
    assert (config.compression, resolved(manifest(overlap="true")).overlap) == ("none", "auto")
    assert (config.early_stopping, config.label_smoothing) == (None, 0.0)
    assert (config.run_dir, config.resume, config.init, config.keep_best) == (None,) * 4
    assert (config.global_batch_size, config.accumulate) == (None, 1)


def test_what_the_tasks_defaults_say_of_exchanging_gradients_is_left_out():
    """Synchronised batch norm and local steps cannot be had together, but a training had one of them."""
    of_task = {"sync_every": 4, "outer_optimizer": "nesterov", "compression": "powersgd:4", "profile": "2-3"}
    layers = checkpoint_config.layers_of(Checkpoint(Path("c"), manifest(sync_batch_norm=True)), [])
    config = resolve([Layer("defaults of the task", of_task), *layers])
    assert (config.sync_every, config.outer_optimizer, config.compression) == (None, "average", "none")
    assert (config.profile, config.sync_batch_norm) == (None, True)


def test_an_evaluation_has_its_own_stages_and_a_batch_as_large_as_in_training():
    made = manifest(stages=2, stage_cuts=[3])
    assert (resolved(made).stages, resolved(made, Layer("options", {"stages": 2})).stages) == (1, 2)
    assert resolved(manifest(global_batch_size=50, accumulate=2)).eval_batch_size == 13
    made = manifest()
    made.config["global_batch_size"] = "2"
    with pytest.raises(CheckpointError, match="global_batch_size in its config must be a whole number"):
        resolved(made)

    with pytest.raises(UsageError, match=r"the task 'mine\\x1b\[31m\.pyx+, which is not built in") as seen:
        resolved(manifest(task=f"mine\x1b[31m.py{'x' * 9000}"))
    assert len(str(seen.value)) < 2000

    made = manifest(task="my tasks.py:Mine")
    with pytest.raises(UsageError, match=r"runs only if you name it\nIf .* add: --task 'my tasks\.py:Mine'$"):
        resolved(made)
    assert resolved(made, Layer("options", {"task": "elsewhere.py:Mine"})).task == "elsewhere.py:Mine"


def test_options_of_another_task_are_left_out():
    made = manifest(task="mine.py:Mine", task_options={"size": 3})
    for task in ("mine.py:Other", "digits"):
        assert resolved(made, Layer("options", {"task": task})).task_options == {}


def write(folder: Path, step: int, **fields: object) -> Path:
    return storage.write(folder, {"model/a/kernel": np.ones(3, np.float32)}, manifest(step, **fields))


def test_a_runs_newest_manifest_is_found_and_a_damaged_one_passed_over(tmp_path):
    first, second = (write(tmp_path / "checkpoints", step) for step in (1, 2))
    assert checkpoint_config.find_unverified(tmp_path).path == second
    assert checkpoint_config.find_unverified(first).manifest.step == 1
    (second / "trainer.json").write_text("{}")
    assert checkpoint_config.find_unverified(tmp_path).path == first
    with pytest.raises(CheckpointError, match=r"is damaged: trainer\.json is not as it was written"):
        checkpoint_config.find_unverified(second)


def test_where_the_newest_is_damaged_the_one_before_must_have_its_config(tmp_path):
    first = write(tmp_path, 1, seed=1)
    newest = manifest(2, seed=2)
    with pytest.raises(CheckpointError, match=r"trained with another config\nTo use that one, name it"):
        checkpoint_config.verified(tmp_path, newest)
    assert checkpoint_config.verified(tmp_path, manifest(2, seed=1)).path == first


@pytest.mark.parametrize(
    ("name", "before", "now", "is_same"),
    [
        ("task", "mine.py:Mine", "/first/mine.py:Mine", True),
        ("task", "mine.py:Mine", "mine.py:Other", False),
        ("task_options", {"path": "images"}, {"path": "/first/images"}, True),
        ("task_options", {"path": "images", "model": "a"}, {"path": "images", "model": "b"}, False),
    ],
)
def test_paths_are_the_same_from_another_folder(name, before, now, is_same):
    given = [{"task": "images", name: one} for one in (before, now)]
    found = SimpleNamespace(manifest=SimpleNamespace(config=given[0]))
    assert same_field(name, found, given[1]) is is_same
