"""Reading in real jobs: any number of readers gives the same training, and bad samples are skipped alike."""

import json

import numpy as np
import pytest
import reading_tasks
from support import pool
from support.jobs import Run, launcher, run, temporary_folder, train

from hvdtrain.config import Config
from hvdtrain.data.order import ShuffledOrder

TASKS = reading_tasks.__file__
BAD, EVAL_BAD = reading_tasks.BAD, reading_tasks.EVAL_BAD
# workers, launcher, reader processes; the first is what the others are compared with
JOBS = [(2, "mpi", 0), (2, "gloo", 2), (3, "mpi", 1)]


def damaged(framework: str, workers: int, controller: str, readers: int, *options: str) -> Run:
    task = ["--task", f"{TASKS}:Damaged", "--framework", framework, "--read-workers", str(readers)]
    return pool.train(workers, controller, *task, *options, cwd=temporary_folder())


@pytest.fixture(scope="module", params=["torch"])
def runs(request) -> list[Run]:
    return [damaged(request.param, *job) for job in JOBS]


def values(made: Run, names=("loss", "mae")) -> np.ndarray:
    return np.asarray([[line[name] for name in names] for line in made.metrics])


def indices(made: Run) -> dict[int, list[int]]:
    """Give the samples of each step, whichever worker took them."""
    found: dict[int, list[int]] = {}
    for path in (made.folder / "indices").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            found[line["step"]] = sorted(found.get(line["step"], []) + line["indices"])
    return found


def test_any_number_of_readers_and_workers_gives_the_same_training(runs):
    np.testing.assert_array_equal(values(runs[0]), values(runs[1]))
    for made in runs[2:]:
        assert indices(made) == indices(runs[0])
        np.testing.assert_allclose(values(made), values(runs[0]), rtol=1e-4)


def test_the_next_readable_sample_stands_in_for_a_bad_one(runs):
    everything = [i for i in range(reading_tasks.SIZE) if i not in BAD] + [1, 9, 9, 32]
    trained_on = [i for step in indices(runs[0]).values() for i in step]
    assert sorted(trained_on) == sorted(2 * everything)


def test_an_evaluation_is_the_mean_over_what_can_be_read(runs):
    """The last mean is that of the samples that the data set gives, at the weights of the end."""
    from safetensors.numpy import load_file

    for made in runs:
        newest = max((made.folder / "checkpoints").glob("step-*"))
        state = load_file(newest / "model.safetensors")
        kernel, bias = (next(v for k, v in state.items() if k.endswith(role)) for role in ("kernel", "bias"))
        data = reading_tasks.Files(reading_tasks.EVAL_SIZE, EVAL_BAD)
        samples = [data[i] for i in range(len(data)) if i not in EVAL_BAD]
        errors = [s["inputs"] @ kernel + bias - s["targets"] for s in samples]
        assert made.summary["final"]["mae"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-4)


def test_bad_samples_are_counted_over_all_workers_and_in_the_steps_that_skipped_them(runs):
    """Each line of training is of one step, whose samples the order tells."""
    size, batch = reading_tasks.SIZE, reading_tasks.Damaged.defaults["global_batch_size"]
    order = ShuffledOrder(size, Config.model_fields["seed"].default).indices(np.arange(2 * size))
    batches = [order[first : first + batch] for first in range(0, 2 * size, batch)]
    expected = {step: sum(int(i) in BAD for i in indices) for step, indices in enumerate(batches, 1)}
    assert len(set(expected.values())) > 1
    for made in runs:
        assert made.summary["bad_samples"] == 2 * len(BAD) + 2 * len(EVAL_BAD)
        lines = [line for line in made.metrics if line["phase"] == "train"]
        assert {line["step"]: line.get("bad_samples", 0) for line in lines} == expected
        assert all(line.get("bad_samples") != 0 for line in made.metrics)
        evaluations = [line["bad_samples"] for line in made.metrics if line["phase"] == "eval"]
        assert evaluations == [len(EVAL_BAD)] * 2


def test_by_default_a_bad_sample_ends_the_job_once(tmp_path):
    task = ["--task", f"{TASKS}:OneBad", "--framework", "torch", "--read-workers", "1"]
    command = [*launcher(2, "mpi"), "python", "-m", "hvdtrain", *task, "--run-dir", "run"]
    result = run(command, tmp_path)
    assert result.returncode == 2, result.output
    assert result.output.count("photos/7.png is cut off") == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("framework", "readers"), [("torch", "1"), ("tf", "0")])
def test_data_larger_than_memory_train(framework, readers, tmp_path):
    options = ["--framework", framework, "--read-workers", readers]
    made = train(1, "none", "--task", f"{TASKS}:Large", *options, cwd=tmp_path)
    assert made.summary["steps"] == reading_tasks.LARGE_SIZE // reading_tasks.LARGE_BATCH
