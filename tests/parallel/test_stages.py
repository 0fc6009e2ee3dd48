"""Split models: curves, checkpoints and errors of jobs whose workers have stages of a model."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from support.jobs import LIMIT_SECONDS, Run, launcher, started
from support.pool import GROUPS, command, shared_run

TASKS = str(Path(__file__).with_name("stages_tasks.py"))
MPI = f"mpi{GROUPS}"
STEPS, SAVED = 12, 6
TOLERANCE = 1e-5  # relative, per step
BASE = ("--steps", str(STEPS), "--log-every", "1", "--global-batch-size", "48")
ALL = (  # whatever a step may do at once
    *("--optimizer", "adamw", "--learning-rate", "0.002", "--weight-decay", "0.01", "--ema-decay", "0.9"),
    *("--set", "decay_norms_and_biases=false", "--clip-norm", "0.5"),
    *("--set", 'parameter_groups=[{"match": "*bias", "learning_rate_factor": 2}]'),
    *("--save-every", str(SAVED), "--keep-last", "9", "--eval-every", str(SAVED)),
)
STAY = ("--set", "stage_cuts=[2]")


def task(name: str) -> tuple[str, str]:
    return "--task", f"{TASKS}:{name}"


def trained(framework: str, workers: int, stages: int, *options: str, accumulate: int = 4) -> Run:
    return shared_run(
        workers,
        "none" if workers == 1 else MPI,
        *("--framework", framework, *BASE, *options),
        *("--accumulate", str(accumulate * stages // workers)),
        *("--stages", str(stages)) * (stages > 1),
    )


def difference(run: Run, expected: Run) -> float:
    assert len(run.losses) == len(expected.losses) > 0
    return float(np.max(np.abs(np.divide(run.losses, expected.losses) - 1)))


def evaluated(run: Run, name: str = "loss") -> list[float]:
    return [line[name] for line in run.metrics if line["phase"] == "eval"]


def refused(tmp_path: Path, framework: str, name: str, *options: str) -> str:
    """Return what a job says that ends before its first step."""
    words = ["--framework", framework, *BASE, *task(name), "--run-dir", "run", "--stages", "2", *options]
    result = command(2, MPI, framework, *words, cwd=tmp_path)
    assert result.returncode in (2, 3, 4), result.output[-3000:]
    assert "Traceback" not in result.output
    return result.output


@pytest.mark.parametrize(
    ("framework", "name", "workers", "stages"),
    [
        ("torch", "Gpt", 4, 2),
        ("tf", "Gpt", 2, 2),
    ],
)
def test_stages_draw_the_curve_of_one_worker(framework, name, workers, stages):
    found = trained(framework, workers, stages, *task(name), *ALL)
    expected = trained(framework, 1, 1, *task(name), *ALL)
    assert difference(found, expected) < TOLERANCE
    norms = [
        [line["gradient_norm"] for line in job.metrics if line["phase"] == "train"]
        for job in (found, expected)
    ]
    np.testing.assert_allclose(*norms, rtol=1e-3)
    np.testing.assert_allclose(evaluated(found), evaluated(expected), rtol=TOLERANCE)
    np.testing.assert_allclose(evaluated(found, "accuracy"), evaluated(expected, "accuracy"), rtol=TOLERANCE)


@pytest.mark.parametrize(("framework", "workers", "stages"), [("torch", 3, 3)])
def test_a_resnet_draws_the_curve_of_whole_models(framework, workers, stages):
    options = (*task("ResNet"), "--sync-batch-norm", "--steps", "3")
    found = trained(framework, workers, stages, *options)
    # micro-batches of the same samples, over which batch norm computes its statistics
    expected = trained(framework, workers // stages, 1, *options)
    assert difference(found, expected) < TOLERANCE
    np.testing.assert_allclose(evaluated(found), evaluated(expected), rtol=1e-3)


def test_keras_layers_whose_outputs_depend_on_what_they_move():
    found = trained("tf", 2, 2, *task("Spectral"), *STAY)
    assert difference(found, trained("tf", 1, 1, *task("Spectral"))) < TOLERANCE


@pytest.mark.parametrize(("framework", "name"), [("torch", "Bert"), ("tf", "NoParameters")])
def test_blocks_pass_on_whatever_they_return(framework, name):
    count, cuts = (3, ()) if framework == "torch" else (2, ("--set", "stage_cuts=[1]"))
    found = trained(framework, count, count, *task(name), *cuts)
    expected = trained(framework, 1, 1, *task(name))
    assert difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("framework", ["tf"])
def test_shapes_may_change_from_batch_to_batch(framework):
    options = (*task("Lengths"), "--steps", "20")
    found, expected = (trained(framework, n, n, *options, accumulate=1) for n in (2, 1))
    assert difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("framework", ["torch"])
def test_metrics_of_the_whole_evaluation_and_skipped_samples(framework):
    options = ("--steps", "30", "--on-bad-sample", "skip", *task("Measured"))
    found, expected = trained(framework, 4, 2, *options), trained(framework, 1, 1, *options)
    assert difference(found, expected) < TOLERANCE
    for name in ("accuracy", "f1", "auc"):
        np.testing.assert_allclose(evaluated(found, name), evaluated(expected, name), rtol=1e-4)
    bad = [sum(line.get("bad_samples", 0) for line in one.metrics) for one in (found, expected)]
    assert bad == [1, 1]


@pytest.mark.parametrize("framework", ["torch"])
def test_a_run_goes_on_with_other_stages_and_in_the_other_framework(framework):
    other = {"torch": "tf", "tf": "torch"}[framework]
    options = (*task("Gpt"), *ALL)
    whole = trained(framework, 1, 1, *options)
    saved = trained(framework, 4, 2, *options).folder / "checkpoints" / f"step-{SAVED:08}"
    for to, workers, stages in ((framework, 3, 3), (other, 2, 2)):
        found = trained(to, workers, stages, *options, "--resume", str(saved))
        assert len(found.losses) == STEPS - SAVED
        np.testing.assert_allclose(found.losses, whole.losses[SAVED:], rtol=1e-4)
        np.testing.assert_allclose(evaluated(found)[-1], evaluated(whole)[-1], rtol=1e-4)


@pytest.mark.parametrize("framework", ["tf"])
def test_a_checkpoint_is_evaluated_in_stages(framework, tmp_path):
    """Each worker makes the parameters of its stage alone, and no optimizer's slots."""
    expected = trained(framework, 1, 1, *task("Gpt"), *ALL)
    words = ["evaluate", str(expected.folder), *task("Gpt"), "--set", "stages=2", "--output", "found.jsonl"]
    result = command(2, MPI, framework, *words, cwd=tmp_path)
    assert result.returncode == 0, result.output[-3000:]
    found = json.loads((tmp_path / "found.jsonl").read_text())
    assert (found["workers"], found["averaged_weights"]) == (2, True)
    np.testing.assert_allclose(found["loss"], evaluated(expected)[-1], rtol=TOLERANCE)


@pytest.mark.parametrize("framework", ["torch"])
def test_weights_or_a_part_of_them_start_a_run_with_stages(framework):
    source = str(trained(framework, 1, 1, *task("Gpt"), *ALL).folder)
    for choice in ([], ["--init-skip", "*kernel"]):
        options = (*task("Gpt"), "--steps", "2", "--init", source, *choice)
        found, expected = (trained(framework, *shape, *options) for shape in ((2, 2), (1, 1)))
        assert difference(found, expected) < TOLERANCE


def test_what_needs_the_whole_model_refuses_stages(tmp_path):
    source = str(trained("torch", 1, 1, *task("Gpt"), *ALL).folder)
    words = ["predict", source, *task("Gpt"), "--set", "stages=2", "--output", "found.npz"]
    result = command(2, MPI, "torch", *words, cwd=tmp_path)
    assert result.returncode == 2, result.output[-3000:]
    assert "stages 2 cannot be used by predict: no worker has the whole model" in result.output


@pytest.mark.parametrize(
    ("framework", "name", "options", "said"),
    [
        ("torch", "OneBlock", (), "the model has 1 block, which cannot be divided into 2 stages"),
        ("torch", "Wrong", (), "the blocks compute other outputs than the model"),
        ("tf", "Left", (), "no block has the model's"),
        ("torch", "Twice", (), "stages 2 cannot be used with the task's own torch_loss"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_split_is_refused_with_the_reason(framework, name, options, said, tmp_path):
    assert said in refused(tmp_path, framework, name, *options)


@pytest.mark.parametrize("framework", ["tf"])
def test_a_block_that_uses_another_stages_weights_fails(framework, tmp_path):
    output = refused(tmp_path, framework, "Unnamed", "--set", "stage_cuts=[3]")
    assert re.search(r"a block of the model uses \S+/kernel of a block of another stage", output), output


def test_gloo_is_refused_with_the_reason(tmp_path):
    words = ["--framework", "torch", *BASE, *task("Mlp"), "--stages", "2", "--run-dir", "run"]
    result = command(2, "gloo", "torch", *words, cwd=tmp_path)
    assert result.returncode != 0
    assert "MPI's point-to-point messages" in result.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_stage_that_is_lost_ends_the_job_with_its_name(tmp_path):
    """It is stopped: of one that is killed mpirun speaks, which kills the others at once."""
    words = ["--framework", "torch", *task("Mlp"), "--stages", "2", "--epochs", "9999", "--accumulate", "4"]
    words += ["--run-dir", "run", "--stall-timeout", "10", "--log-every", "5"]
    log = tmp_path / "run" / "metrics.jsonl"
    command = [*launcher(2, "mpi"), "python", "-m", "hvdtrain", *words]
    with started(command, tmp_path, OMP_NUM_THREADS="1") as job:
        until = time.monotonic() + LIMIT_SECONDS
        while not (log.exists() and log.stat().st_size > 1000):
            assert time.monotonic() < until, job.result().output
            time.sleep(0.1)
        time.sleep(2)  # until each worker has told the others what it does
        os.kill(_pid_of_rank(job, 1), signal.SIGSTOP)
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 3
    lost = rf"rank 1 on {os.uname().nodename} has not answered for \d+ s: .* as stage 2 of 2"
    assert re.search(lost, result.output), result.output


def _pid_of_rank(job: started, rank: int) -> int:
    for pid in job.pids():
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if f"OMPI_COMM_WORLD_RANK={rank}".encode() in environ and b"hvdtrain" in command:
            return pid
    raise AssertionError(f"rank {rank} has no process")
