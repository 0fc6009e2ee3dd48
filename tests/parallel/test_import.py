"""Weights that a framework saved become a checkpoint; files that are not that are named."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support.pool import Key, call, train
from support.serving import exports, hvdtrain, last_eval, newest, trained

HERE = Path(__file__).parent
TORCH, KERAS = ("safetensors", "pt", "torch-export", "onnx"), ("keras", "saved-model")  # as test_export


def exported(form: str) -> Path:
    """Give an export of the run of torch."""
    forms = TORCH if form in TORCH else KERAS
    return Path(exports(forms)["torch", form][0].partition(": ")[2].partition(" (")[0])


def import_command(weights: Path, output: Path, *options: str) -> list[str]:
    return ["import", str(weights), "--task", "digits", "--output", str(output), *options]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with files of PyTorch and Keras: good ones, and all kinds of others."""
    folder = tmp_path_factory.mktemp("weights")
    jobs = {"torch": ("job_torch_weights.py", "pt"), "tf": ("job_keras_weights.py", "keras")}
    for framework, (job, source) in jobs.items():
        arguments = {"path": str(HERE / job), "arguments": [str(exported(source))]}
        call(Key(framework, "none", 1), "support.cases:script", folder, **arguments)
    return folder


GOOD = {
    "torch": ["parallel.pth", "legacy.pt", "whole.safetensors"],
    "tf": ["good.weights.h5", "compiled.keras"],
}
BAD = {
    "torch": {
        "code.pt": "is refused: to read it, code that it names would have to run (Trying to load unsupported "
        "GLOBAL posix.system",
        "cut.pt": "is damaged or no file of weights",
        "empty.pt": "is damaged or no file of weights (EOFError)",
        "cut.safetensors": "is damaged or no file of weights (SafetensorError",
        "renamed.pt": "missing: conv1.weight (32, 1, 3, 3); closest: conv_1.weight",
        "shape.pt": "misshapen: dense2.bias must be (10,), is (11,)",
        "other.pt": "holds no weights; its keys are epoch",
        "list.pt": "holds a list, not a state_dict",
        "missing.pt": "there is no file ",
    },
    "tf": {
        "cut.weights.h5": "is damaged or no file of weights",
        "cut.keras": "is damaged or no file of weights",
        "damaged_lzma.keras": "is damaged or no file of weights",
        "no_weights.keras": "is damaged or no file of weights",
        "other.weights.h5": "missing: layers/conv2d_1/vars/0 (3, 3, 32, 64)",
        "shape.weights.h5": "misshapen: layers/dense_1/vars/1 must be (10,), is (11,)",
        "old.weights.h5": "is in Keras 2's form",
    },
}


@pytest.mark.parametrize("framework", GOOD)
def test_the_weights_are_those_of_the_checkpoint_that_was_exported(framework, made, tmp_path):
    forms = {"torch": ("safetensors", "pt"), "tf": ("keras",)}[framework]
    files = [made / name for name in GOOD[framework]] + [exported(form) for form in forms]
    folders = [tmp_path / str(i) for i in range(len(files))]
    results = hvdtrain(*map(import_command, files, folders), cwd=tmp_path, framework=framework)
    assert [error for _, error in results] == [""] * len(files)
    expected = load_file(newest(trained("torch")) / "model.safetensors")
    for folder, (printed, _) in zip(folders, results, strict=True):
        found = load_file(folder / "step-00000000" / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all((found[name] == expected[name]).all() for name in found)
        assert "151,306 numbers" in printed
        assert printed.strip().endswith(f"--framework {framework} --task digits --init {folder}")
    said = {"torch": "; of its key 'state_dict'; prefix 'module.' taken off\n", "tf": ": 8 arrays, "}
    assert said[framework] in results[0][0]


@pytest.mark.parametrize("framework", BAD)
def test_a_wrong_file_is_named_and_leaves_nothing(framework, made, tmp_path):
    names = BAD[framework]
    commands = [import_command(made / name, tmp_path / "out") for name in names]
    results = hvdtrain(*commands, cwd=tmp_path, framework=framework)
    for (name, said), (_, problem) in zip(names.items(), results, strict=True):
        assert str(made / name) in problem
        assert said in problem, name
    assert list(tmp_path.iterdir()) == []
    assert not (made / "ran").exists(), "a file's code has run"


def test_what_does_not_fit_is_refused_before_anything_is_loaded(tmp_path):
    weights = exported("pt")
    (tmp_path / "full" / "step-00000003").mkdir(parents=True)
    (tmp_path / "x.bin").touch()
    full, framework, kind = hvdtrain(
        import_command(weights, tmp_path / "full"),
        import_command(weights, tmp_path / "out", "--framework", "tf"),
        import_command(tmp_path / "x.bin", tmp_path / "out"),
        cwd=tmp_path,
        framework="torch",
    )
    assert full[1].startswith(f"--output {tmp_path / 'full'} has checkpoints already")
    assert framework[1].startswith(f"{weights.name} is a file of --framework torch, not of tf")
    assert kind[1].startswith("x.bin: of what kind is it?\nKnown endings: .pt, ")


@pytest.mark.parametrize(("framework", "option"), [("tf", "--init"), ("torch", "--resume")])
def test_training_goes_on_from_it(framework, option, tmp_path):
    hvdtrain(import_command(exported("pt"), tmp_path / "out"), cwd=tmp_path, framework="torch")
    words = ("--framework", framework, option, "out", "--steps", "1", "--learning-rate", "1e-6")
    summary = train(1, "none", *words, cwd=tmp_path).summary
    assert summary["final"]["loss"] == pytest.approx(last_eval(trained("torch"))["loss"], rel=1e-3)
