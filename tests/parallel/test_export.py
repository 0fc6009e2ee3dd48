"""Exports load elsewhere by the line that was printed, and give what training evaluated."""

import json
import re
from pathlib import Path

import pytest
from support.jobs import launcher, run
from support.pool import Key, call, shared_run
from support.serving import exports, hvdtrain, last_eval, trained

HERE = Path(__file__).parent
EXPORT_FORMATS = {"torch": ("safetensors", "pt", "torch-export", "onnx"), "tf": ("keras", "saved-model")}


def loading_line(printed: str) -> str:
    return re.search(r"^to load it: (.*)$", printed, re.MULTILINE)[1]


@pytest.mark.parametrize("framework", EXPORT_FORMATS)
def test_every_form_loads_by_its_line_and_gives_the_loss_that_training_evaluated(framework, tmp_path):
    done = exports(EXPORT_FORMATS[framework])
    assert [error for _, error in done.values()] == [""] * len(done)
    lines = [loading_line(printed) for printed, _ in done.values()]
    result = run(["python", str(HERE / "job_load.py"), framework, json.dumps(lines)], tmp_path)
    losses = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("LOSS")]
    expected = [last_eval(trained(trained_in))["loss"] for trained_in, _ in done]
    assert losses == pytest.approx(expected, rel=1e-5), result.output[-3000:]


def test_an_export_that_is_there_is_replaced_by_force_alone(tmp_path):
    source, output = str(trained("torch").folder), tmp_path / "model.pt"
    command = ["export", source, "--to", "pt", "--output", str(output)]
    output.write_text("precious")
    refused, _ = hvdtrain(command, [*command, "--force"], cwd=tmp_path, framework="torch")
    assert refused[1].startswith(f"{output} exists\n")
    assert output.read_bytes() != b"precious"
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_several_workers_are_refused(tmp_path):
    source = str(trained("torch").folder)
    command = [*launcher(2, "mpi"), "python", "-m", "hvdtrain", "export", source, "--to", "pt"]
    result = run([*command, "--output", "x.pt"], tmp_path)
    assert result.returncode == 2
    assert "export is done by one worker; there are 2" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_program_of_keras_takes_what_training_gives_the_model(tmp_path):
    """In PyTorch, job_torch_exports.py shows it."""
    task = f"{HERE / 'input_tasks.py'}:"
    source = str(shared_run(1, "none", "--framework", "tf", "--task", f"{task}Padded").folder)
    command = ["export", source, "--to", "saved-model", "--task"]
    commands = [*command, f"{task}Padded"], [*command, f"{task}Served", "--force"]
    done, served = hvdtrain(*commands, cwd=tmp_path, framework="tf")
    for printed in (done[0], served[0]):
        assert "takes any batch size, any length" in printed
        for name in ("input_ids", "attention_mask"):
            assert re.search(rf"^input: {name} int\d+ \(batch, length\)$", printed, re.MULTILINE)
        assert "compared on batches of " in printed
        assert "input_ids=input_ids" in loading_line(printed)
    assert "output: outputs (batch, 3)\n" in done[0]
    assert "output: labels (batch,)\n" in served[0]


@pytest.mark.parametrize(("framework", "job"), [("torch", "torch"), ("tf", "keras")])
def test_models_of_other_kinds(framework, job, tmp_path):
    path = str(HERE / f"job_{job}_exports.py")
    call(Key(framework, "none", 1), "support.cases:script", tmp_path, path=path, arguments=[])
