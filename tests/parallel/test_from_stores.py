"""Commands that start from a checkpoint in an object store, with workers."""

import json

import numpy as np
import pytest
from support.object_store import object_store
from support.pool import command, shared_run, train

pytest.importorskip("s3fs")
pytest.importorskip("moto")

OPTIONS = ("--task", "digits", "--steps", "6", "--batch-size", "8", "--save-every", "3", "--eval-every", "3")


@pytest.fixture(scope="module")
def store():
    with object_store() as found:
        trained = shared_run(1, "none", "--framework", "torch", *OPTIONS)
        found.put_folder(trained.folder, "runs/first")
        yield found


def hvdtrain(store, cwd, *words, workers=1, controller="none", framework="torch", returncode=0):
    """Run a command with its own cache; return what it showed."""
    environ = {**store.environ, "HVDTRAIN_CACHE": str(cwd / "cache")}
    done = command(workers, controller, framework, *words, cwd=cwd, **environ)
    assert done.returncode == returncode, done.output[-5000:]
    assert str(cwd / "cache") not in done.output
    return done.output


@pytest.mark.parametrize(("framework", "controller"), [("tf", "gloo")])
def test_a_checkpoint_in_a_store_is_evaluated(store, tmp_path, framework, controller):
    url, output = store.url("runs/first"), tmp_path / "metrics.jsonl"
    before = store.objects("runs")
    words = ("evaluate", url, "--framework", framework, "--output", str(output))
    shown = hvdtrain(store, tmp_path, *words, workers=2, controller=controller, framework=framework)
    assert f"{url}/checkpoints/step-00000006" in shown
    trained = shared_run(1, "none", "--framework", "torch", *OPTIONS)
    found = json.loads(output.read_text())
    assert found["checkpoint"] == f"{url}/checkpoints/step-00000006"
    for name, value in trained.summary["final"].items():
        assert found[name] == pytest.approx(value, rel=1e-4)
    assert store.objects("runs") == before


def test_predictions_and_exports_are_written_here(store, tmp_path):
    url, made = store.url("runs/first"), tmp_path / "outputs.npz"
    shown = hvdtrain(store, tmp_path, "predict", url, "--output", str(made))
    assert str(made) in shown
    with np.load(made) as arrays:
        assert all(len(array) > 100 for array in arrays.values())
    words = ("export", f"{url}/checkpoints/step-00000003", "--to", "safetensors")
    assert "Give an --output" in hvdtrain(store, tmp_path, *words, returncode=2)
    words += ("--output", store.url("made.safetensors"))
    assert "a path of this host is needed here" in hvdtrain(store, tmp_path, *words, returncode=2)


@pytest.mark.parametrize(("framework", "controller"), [("torch", "gloo")])
def test_training_starts_from_weights_in_a_store(store, tmp_path, framework, controller):
    url = store.url("runs/first/checkpoints/step-00000003")
    environ = {**store.environ, "HVDTRAIN_CACHE": str(tmp_path / "cache")}
    words = ("--framework", framework, *OPTIONS, "--init")
    trained = train(
        2, controller, *words, store.url("runs/first"), "--best", "loss:max", cwd=tmp_path, **environ
    )
    assert f"weights of {url}, step 3" in trained.result.output
    config = (trained.folder / "config.yaml").read_text()
    assert f"\ninit: {store.url('runs/first')}\n" in config
    assert str(tmp_path / "cache") not in config
    local = shared_run(1, "none", "--framework", "torch", *OPTIONS).folder / "checkpoints" / "step-00000003"
    (tmp_path / "other").mkdir()
    other = train(2, controller, *words, str(local), cwd=tmp_path / "other")
    assert trained.losses == other.losses


def test_a_checkpoint_that_is_not_there_is_told(store, tmp_path):
    url = store.url("runs/none")
    words = ["--framework", "torch", *OPTIONS, "--init", url, "--run-dir", str(tmp_path / "run")]
    assert f"no checkpoint in {url}" in hvdtrain(store, tmp_path, *words, returncode=2)
