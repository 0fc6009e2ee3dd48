"""The two backends, side by side: files of the same names with the same public names in the same order."""

import ast
from pathlib import Path

import pytest

import hvdtrain

FOLDER = Path(hvdtrain.__file__).parent / "backends"
FRAMEWORKS = {"torch": "TorchBackend", "tensorflow": "TensorFlowBackend"}
# files of one framework alone: what Keras lacks, or has and PyTorch needs no part for
OWN_FILES = {
    # Keras keeps everything in variables, made with it; a graph has all gradients at once
    "torch": {"state/tensors.py"},
    "tensorflow": {
        *("functions.py", "distributed_optimizer.py"),
        "state/layer_state.py",  # its modules have state dicts
    },
}


def files(framework: str) -> set[str]:
    """Return the paths of a framework's files below its folder."""
    folder = FOLDER / framework
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}


def test_both_folders_have_the_same_files():
    torch, tensorflow = (files(framework) for framework in FRAMEWORKS)
    assert torch ^ tensorflow == OWN_FILES["torch"] | OWN_FILES["tensorflow"]
    assert torch >= OWN_FILES["torch"]


def classes(file: str) -> dict[str, dict[str, ast.FunctionDef]]:
    """Return the public methods of a file's classes."""
    found = [node for node in ast.parse((FOLDER / file).read_text()).body if isinstance(node, ast.ClassDef)]
    return {
        one.name: {f.name: f for f in one.body if isinstance(f, ast.FunctionDef) and f.name[0] != "_"}
        for one in found
    }


def promise(function: ast.FunctionDef) -> tuple[str, bool]:
    """Return the arguments of a function without their types, and whether all ranks must call it."""
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    return ast.unparse(arguments), (ast.get_docstring(function) or "").startswith("Collective.")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_backend_adds_nothing_to_the_seam_and_says_of_a_method_that_it_is_collective(framework):
    seam, parts = {}, classes("base.py")
    for part in ("Seam", "Resizable", "Probes", "TrainedParameters", "LocalSteps", "ModelFiles"):
        seam |= parts[part]
    for name, method in classes(f"{framework}/backend.py")[FRAMEWORKS[framework]].items():
        if ast.get_docstring(method) is None:  # it has the seam's
            method.body.insert(0, seam[name].body[0])
        assert promise(method) == promise(seam[name]), name
