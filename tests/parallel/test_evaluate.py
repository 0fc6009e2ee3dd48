"""A checkpoint evaluates to what training said, at any worker count and in either framework."""

import json
import shutil
from pathlib import Path

import pytest
from support import pool
from support.jobs import Result, launcher, run
from support.serving import last_eval, newest, trained

SMALL = f"{Path(__file__).parent / 'small_task.py'}:Small"
METRICS = ("loss", "accuracy")


def evaluate(workers: int, checkpoint: Path, *options: str, cwd: Path, framework: str = "torch") -> Result:
    controller = pool.controller_of(framework, workers)
    return pool.command(workers, controller, framework, "evaluate", str(checkpoint), *options, cwd=cwd)


@pytest.mark.parametrize(
    ("trained_in", "framework", "workers"),
    [("torch", "torch", 2), ("torch", "tf", 1), ("tf", "torch", 1)],
)
def test_metrics_are_those_of_the_trainings_last_evaluation(trained_in, framework, workers, tmp_path):
    source, output = trained(trained_in), tmp_path / "evaluations.jsonl"
    options = [] if framework == trained_in else ["--framework", framework]
    options += ["--output", str(output)]
    result = evaluate(workers, source.folder, *options, cwd=tmp_path, framework=framework)
    assert result.returncode == 0, result.output[-3000:]
    (line,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert (line["workers"], line["framework"], line["step"]) == (workers, framework, 90)
    assert line["checkpoint"] == str(newest(source))
    expected = [last_eval(source)[name] for name in METRICS]
    close = 1e-6 if framework == trained_in else 1e-5
    assert [line[name] for name in METRICS] == pytest.approx(expected, rel=close)
    # a pool's earlier cases make TensorFlow warn of traces
    (said,) = (text for text in result.output.splitlines() if not text.startswith("WARNING:tensorflow"))
    assert said.startswith(
        f"eval  loss {expected[0]:.4f}  accuracy {expected[1]:.4f}  (359 samples of digits"
    )


def test_from_python_every_worker_gets_the_same_and_the_run_directory_keeps_it(tmp_path):
    source = trained("torch")
    shutil.copytree(source.folder, tmp_path / "run")
    script = tmp_path / "script.py"
    script.write_text(
        "import hvdtrain\n"
        "from hvdtrain.tasks.digits import Digits\n"
        f"for fields in ({{}}, {{'eval_batch_size': 100, 'task': Digits}}):\n"
        f"    print('GOT', hvdtrain.evaluate({str(tmp_path / 'run')!r}, **fields)['loss'])\n"
    )
    result = run([*launcher(2, "mpi"), "python", str(script)], tmp_path)
    assert result.returncode == 0, result.output[-3000:]
    found = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("GOT")]
    assert found == pytest.approx([last_eval(source)["loss"]] * 4, rel=1e-6)
    lines = [json.loads(text) for text in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(sorted(found)[::2], rel=1e-6)


def test_a_users_task_runs_only_where_it_is_named(tmp_path):
    source = pool.train(1, "none", "--framework", "torch", "--task", SMALL, "--steps", "3", cwd=tmp_path)
    refused = evaluate(1, source.folder, cwd=tmp_path)
    assert refused.returncode == 2
    assert f"If you trust it, add: --task {SMALL}" in refused.stderr
    result = evaluate(1, source.folder, "--task", SMALL, cwd=tmp_path)
    assert result.returncode == 0, result.output[-3000:]
    line = json.loads((source.folder / "evaluations.jsonl").read_text())
    assert line["mae"] == pytest.approx(last_eval(source)["mae"], rel=1e-6)


def test_a_worker_that_lacks_the_checkpoint_says_so_with_its_host(tmp_path):
    words = ["evaluate", str(tmp_path / "missing")]
    result = run([*launcher(2, "mpi"), "python", "-m", "hvdtrain", *words], tmp_path)
    assert result.returncode == 2
    assert "rank 0 on " in result.stderr
    assert f"there is no checkpoint {tmp_path / 'missing'}" in result.stderr
    assert "each host needs it, under this path" in result.stderr


def test_code_that_changed_since_the_checkpoint_is_noted(tmp_path):
    """It is seen by what the model computes, wherever a checkpoint is opened, and in the other framework."""
    task, run_dir = ("--task", SMALL.replace(":Small", ":Changing")), str(tmp_path / "run")
    job = ("--framework", "torch", *task)
    pool.train(2, "mpi", *job, cwd=tmp_path)

    def said(*words, changed="", workers=1, framework="torch"):
        controller = pool.controller_of(framework, workers)
        result = pool.command(workers, controller, framework, *words, cwd=tmp_path, CHANGED=changed)
        assert result.returncode == 0, result.output
        return result.output

    evaluation = ("evaluate", run_dir, *task)
    assert "Has its code changed" not in said(*evaluation)
    assert "Has its code changed" not in said(*evaluation, "--framework", "tf", framework="tf")
    assert "the loss computes something else" in said(*evaluation, changed="loss", workers=2)
    for words in (
        evaluation,
        ("predict", run_dir, *task, "--output", str(tmp_path / "predicted.npz")),
        ("export", run_dir, *task, "--to", "safetensors"),
        (*job, "--init", run_dir, "--run-dir", str(tmp_path / "tuned"), "--steps", "1"),
        (*job, "--run-dir", run_dir, "--resume", "--epochs", "3"),
    ):
        text = said(*words, changed="model")
        assert "the model computes something else" in text, (words, text)
        assert "outputs for the same drawn inputs differ by" in text
