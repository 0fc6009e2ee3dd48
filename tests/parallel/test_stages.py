"""Split models: curves, checkpoints and errors of jobs whose workers have stages of a model."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.jobs import FRAMEWORKS, LIMIT_SECONDS, Run, launcher, started
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
RATE = 0.01
PLAIN_SGD = (
    *("--optimizer", "sgd", "--momentum", "0", "--set", "weight_decay=0", "--set", "clip_norm=null"),
    *("--learning-rate", str(RATE), "--lr-schedule", "constant", "--warmup-epochs", "0"),
    *("--steps", "3", "--save-every", "1", "--keep-last", "9"),
)


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


def evaluated(run: Run, name: str = "loss", phase: str = "eval") -> list[float]:
    return [line[name] for line in run.metrics if line["phase"] == phase]


@pytest.mark.parametrize(("framework", "workers"), [("torch", 4), ("tf", 2)])
def test_stages_draw_the_curve_of_one_worker(framework, workers):
    found = trained(framework, workers, 2, *task("Gpt"), *ALL)
    expected = trained(framework, 1, 1, *task("Gpt"), *ALL)
    assert found.difference(expected) < TOLERANCE
    norms = [evaluated(job, "gradient_norm", "train") for job in (found, expected)]
    np.testing.assert_allclose(*norms, rtol=1e-3)
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(evaluated(found, name), evaluated(expected, name), rtol=TOLERANCE)


def test_a_resnet_draws_the_curve_of_whole_models():
    options = (*task("ResNet"), "--sync-batch-norm", "--steps", "3")
    # micro-batches of the same samples, over which batch norm computes its statistics
    found, expected = (trained("torch", n, n, *options) for n in (3, 1))
    assert found.difference(expected) < TOLERANCE
    np.testing.assert_allclose(evaluated(found), evaluated(expected), rtol=1e-3)


@pytest.mark.parametrize(
    ("framework", "name", "stages", "options"),
    [
        ("torch", "Bert", 3, ()),
        ("torch", "Hazards", 2, ("--set", "stage_cuts=[1]", *ALL)),
        ("torch", "Moving", 2, ("--set", "stage_cuts=[5]", *ALL)),
        ("tf", "Spectral", 2, ("--set", "stage_cuts=[2]")),
    ],
)
def test_what_is_easily_lost_is_computed_as_by_one_worker(framework, name, stages, options):
    found = trained(framework, stages, stages, *task(name), *options)
    assert found.difference(trained(framework, 1, 1, *task(name), *options[2:])) < TOLERANCE


def test_shapes_may_change_from_batch_to_batch():
    options = (*task("Lengths"), "--steps", "20")
    found = trained("tf", 2, 2, *options, "--set", "stage_cuts=[1]", accumulate=1)
    assert found.difference(trained("tf", 1, 1, *options, accumulate=1)) < TOLERANCE


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_backward_pass_draws_what_the_forward_pass_drew(framework):
    """The sum of weights times their gradients is then the loss."""
    found = trained(framework, 2, 2, *task("DropsOut"), *PLAIN_SGD, "--set", "stage_cuts=[3]", accumulate=3)
    kernels = [first_kernel(found.folder / "checkpoints" / f"step-{step:08}") for step in (1, 2, 3)]
    for before, after, loss in zip(kernels[:-1], kernels[1:], found.losses[1:], strict=True):
        gradient = (before - after) / RATE
        assert float((gradient * before).sum()) == pytest.approx(loss, rel=1e-3)


def first_kernel(checkpoint: Path) -> np.ndarray:
    arrays = load_file(checkpoint / "model.safetensors")
    return next(array.astype(np.float64) for array in arrays.values() if array.shape == (64, 32))


@pytest.mark.parametrize(("name", "is_noted"), [("TrainsOtherwise", True), ("DropsOut", False)])
def test_blocks_that_differ_in_training_are_noted(name, is_noted, tmp_path):
    words = ["--framework", "torch", *BASE, *task(name), "--stages", "2", "--check"]
    made = command(2, MPI, "torch", *words, cwd=tmp_path)
    assert made.returncode == 0, made.output
    assert ("in training, the blocks compute other outputs than the model" in made.output) == is_noted


def test_metrics_of_the_whole_evaluation_and_skipped_samples():
    options = ("--steps", "30", "--on-bad-sample", "skip", *task("Measured"))
    found, expected = trained("torch", 4, 2, *options), trained("torch", 1, 1, *options)
    assert found.difference(expected) < TOLERANCE
    for name in ("accuracy", "f1", "auc"):
        np.testing.assert_allclose(evaluated(found, name), evaluated(expected, name), rtol=1e-4)
    bad = [sum(line.get("bad_samples", 0) for line in one.metrics) for one in (found, expected)]
    assert bad == [1, 1]


def test_a_run_goes_on_with_other_stages_and_in_the_other_framework():
    options = (*task("Gpt"), *ALL)
    whole = trained("torch", 1, 1, *options)
    saved = trained("torch", 4, 2, *options).folder / "checkpoints" / f"step-{SAVED:08}"
    for framework, stages in (("torch", 3), ("tf", 2)):
        found = trained(framework, stages, stages, *options, "--resume", str(saved))
        assert len(found.losses) == STEPS - SAVED
        np.testing.assert_allclose(found.losses, whole.losses[SAVED:], rtol=1e-4)
        np.testing.assert_allclose(evaluated(found)[-1], evaluated(whole)[-1], rtol=1e-4)


def test_a_checkpoint_is_evaluated_in_stages(tmp_path):
    """Each worker makes the parameters of its stage alone, and no optimizer's slots."""
    expected = trained("tf", 1, 1, *task("Gpt"), *ALL)
    words = ["evaluate", str(expected.folder), *task("Gpt"), "--set", "stages=2", "--output", "found.jsonl"]
    result = command(2, MPI, "tf", *words, cwd=tmp_path)
    assert result.returncode == 0, result.output[-3000:]
    found = json.loads((tmp_path / "found.jsonl").read_text())
    assert (found["workers"], found["averaged_weights"]) == (2, True)
    np.testing.assert_allclose(found["loss"], evaluated(expected)[-1], rtol=TOLERANCE)


@pytest.mark.parametrize("choice", [(), ("--init-skip", "*kernel")])
def test_weights_or_a_part_of_them_start_a_run_with_stages(choice):
    source = str(trained("torch", 1, 1, *task("Gpt"), *ALL).folder)
    options = (*task("Gpt"), "--steps", "2", "--init", source, *choice)
    found, expected = (trained("torch", stages, stages, *options) for stages in (2, 1))
    assert found.difference(expected) < TOLERANCE


@pytest.mark.parametrize(
    ("framework", "name", "said"),
    [
        ("torch", "OwnForward", "the blocks compute other outputs than the model"),
        ("tf", "Left", "no block has the model's"),
        ("tf", "Half", "stages 2 cannot be used with layers that compute in float16"),
        ("tf", "RegularizedAtTheEnd", "losses of their own"),
        ("tf", "Unnamed", r"a block of the model uses \S+/kernel of a block of another stage"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(framework, name, said, tmp_path):
    """What no stages can be combined with is in unit/test_compatibility.py."""
    cuts = ("--set", "stage_cuts=[3]") if name == "Unnamed" else ()
    words = ["--framework", framework, *BASE, *task(name), "--run-dir", "run", "--stages", "2", *cuts]
    result = command(2, MPI, framework, *words, cwd=tmp_path)
    assert result.returncode in (2, 3, 4), result.output[-3000:]
    assert "Traceback" not in result.output
    assert re.search(said, result.output), result.output


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
