"""Half precision, recomputed blocks and compiled models, in both frameworks."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import jobs
from support.jobs import temporary_folder
from support.pool import command, run_suite, train

SUITE = Path(__file__).with_name("suite_precision.py")


@pytest.mark.parametrize(
    ("framework", "workers", "controller"), [("torch", 1, "none"), ("torch", 2, "mpi"), ("tf", 2, "gloo")]
)
def test_backend_computes_as_it_is_told(framework, workers, controller, tmp_path):
    # one worker measures its memory and its threads: in a process of its own
    runner, marks = (jobs.run_suite, "local") if workers == 1 else (run_suite, "not local")
    runner(SUITE, workers, controller, framework, cwd=tmp_path, timeout=550, marks=marks)


def test_a_bf16_run_is_saved_in_fp32_and_goes_on_in_fp32_in_the_other_framework():
    common = ("--log-every", "1", "--set", "lr_schedule=constant")
    folder = temporary_folder()
    first = train(
        1, "none", "--framework", "torch", "--precision", "bf16", "--steps", "4", *common, cwd=folder
    )
    assert "precision      bf16, weights fp32" in first.result.stdout
    saved = sorted((first.folder / "checkpoints").iterdir())[-1]
    for file in ("model", "optimizer"):
        assert {array.dtype for array in load_file(saved / f"{file}.safetensors").values()} == {
            np.dtype("f4")
        }
    more = ("--framework", "tf", "--precision", "fp32", "--steps", "5", "--learning-rate", "1e-9")
    second = train(1, "none", *more, "--resume", str(saved), *common, cwd=temporary_folder())
    assert "precision bf16 -> fp32" in " ".join(second.result.stdout.split())
    assert [line["step"] for line in second.metrics if line["phase"] == "train"] == [5]
    # a step that hardly moves: the same weights, evaluated in fp32
    assert second.summary["final"]["loss"] == pytest.approx(first.summary["final"]["loss"], rel=2e-3)


@pytest.mark.parametrize("framework", ["torch"])
def test_fp16_without_a_gpu_ends_before_training(framework, tmp_path):
    words = ("--framework", framework, "--precision", "fp16", "--device", "cpu", "--run-dir", "run")
    result = command(1, "none", framework, *words, cwd=tmp_path)
    assert result.returncode == 3
    assert "--precision fp16 needs a GPU" in result.stderr
    assert "--precision bf16" in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
