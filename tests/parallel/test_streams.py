"""Streams in real jobs: exact evaluations, uneven shards, resuming, and what is refused."""

import json

import numpy as np
import pytest
import stream_tasks
from support import pool
from support.jobs import FRAMEWORKS, temporary_folder
from support.stream_files import sample, write_samples

from hvdtrain.checkpoints.storage import checkpoints_in

TASKS = stream_tasks.__file__


def job(framework, task, workers, *options, cwd=None, **more):
    words = ["--task", f"{TASKS}:{task}", "--framework", framework, "--global-batch-size", "12"]
    words += ["--set", "log_every=1", *options]
    return pool.train(
        workers, pool.controller_of(framework, workers), *words, cwd=cwd or temporary_folder(), **more
    )


def mean_error(run, numbers):
    """Return the loss of a run's last checkpoint on samples, by NumPy."""
    from safetensors.numpy import load_file

    path = checkpoints_in(run.folder / "checkpoints")[-1]
    arrays = {name: array for file in path.glob("*.safetensors") for name, array in load_file(file).items()}
    model = [array.ravel() for name, array in arrays.items() if name.startswith("model/")]
    kernel, bias = sorted(model, key=len, reverse=True)
    return np.mean([(one["inputs"] @ kernel + bias - one["targets"]) ** 2 for one in map(sample, numbers)])


def losses(run):
    return {line["step"]: line["loss"] for line in run.metrics if line["phase"] == "train"}


@pytest.mark.parametrize("framework", ["torch"])
def test_dealt_shards_are_trained_and_evaluated_once(framework):
    run = job(framework, "Dealt", 2, "--epochs", "2", "--set", "trace_indices=true")
    traces = [path.read_text().splitlines() for path in sorted((run.folder / "indices").iterdir())]
    steps = [[json.loads(line)["indices"] for line in lines] for lines in zip(*traces, strict=True)]
    assert sum(len(part) for step in steps for part in step) == 2 * stream_tasks.SIZE
    assert any(not all(step) for step in steps)  # padding
    np.testing.assert_allclose(run.summary["final"]["loss"], mean_error(run, range(100, 137)), rtol=1e-4)


@pytest.mark.parametrize("framework", ["tf"])
def test_a_stream_that_all_read_has_the_curve_of_one_worker(framework):
    fields = ("--epochs", "2", "--set", "initial_parameters=portable")
    one, two = (job(framework, "Whole", workers, *fields) for workers in (1, 2))
    np.testing.assert_allclose(list(losses(one).values()), list(losses(two).values()), rtol=1e-4)
    np.testing.assert_allclose(one.summary["final"]["loss"], two.summary["final"]["loss"], rtol=1e-4)


def files():
    """Return a folder with the samples in files of each format."""
    pytest.importorskip("pyarrow")
    write_samples(folder := temporary_folder(), stream_tasks.SHARDS)
    return folder


def indices(run):
    """Return what all workers trained on, sorted."""
    lines = [line for path in (run.folder / "indices").iterdir() for line in path.read_text().splitlines()]
    return sorted(index for line in lines for index in json.loads(line)["indices"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_parquet_has_one_curve_at_any_number_of_workers(framework):
    fields, folder = ("--epochs", "2", "--set", "initial_parameters=portable"), files()
    one = job(framework, "Parquet", 1, *fields, cwd=files())
    job(framework, "Parquet", 2, *fields, "--set", "trace_indices=true", "--epochs", "0.8", cwd=folder)
    two = job(framework, "Parquet", 2, *fields, "--set", "trace_indices=true", "--resume", "auto", cwd=folder)
    np.testing.assert_allclose(list(losses(two).values()), list(losses(one).values()), rtol=1e-4)
    assert indices(two) == sorted(2 * list(range(stream_tasks.SIZE)))


@pytest.mark.parametrize(
    ("framework", "task", "is_dealt"),
    [
        ("torch", "HuggingFace", True),
        ("tf", "TensorFlow", False),
    ],
)
def test_streams_of_other_packages(framework, task, is_dealt):
    run = job(framework, task, 2, "--epochs", "2", "--set", "trace_indices=true", cwd=files())
    assert run.summary["samples"] == 2 * stream_tasks.SIZE
    found = indices(run)
    assert is_dealt or found == sorted(2 * list(range(stream_tasks.SIZE)))
    assert len(found) == 2 * stream_tasks.SIZE


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "length is not declared, cannot be used with epochs"),
        (("--steps", "5", "--set", "sync_every=2"), "a stream, cannot be used with sync_every 2"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(options, said):
    words = ("--task", f"{TASKS}:Undeclared", "--framework", "torch", *options)
    result = pool.command(1, "none", "torch", *words, cwd=temporary_folder())
    assert result.returncode == 2
    assert said in result.stderr
