"""The two backends, side by side: files of the same names with the same public names in the same order."""

import ast
import functools
import re
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
        *("functions.py", "steps/step_number.py", "traced_workers.py"),  # a step that is traced
        "state/layer_state.py",  # its modules have state dicts
    },
}
Functions = dict[str, ast.FunctionDef]


def files(framework: str) -> list[str]:
    return sorted(all_files(framework) - OWN_FILES[framework])


def all_files(framework: str) -> set[str]:
    """Return the paths of a framework's files below its folder."""
    folder = FOLDER / framework
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}


@functools.cache
def tree(file: str) -> ast.Module:
    return ast.parse((FOLDER / file).read_text())


def plain(name: str) -> str:
    """Give a name without the framework's in front."""
    return re.sub(r"^(Torch|TensorFlow)(?=[A-Z])", "", name)


@functools.cache
def definitions(file: str) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Give public classes and functions of a file in order."""
    nodes = [node for node in tree(file).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {plain(n.name): n for n in nodes if not n.name.startswith("_")}


def methods(node: ast.AST) -> Functions:
    """Give a class's public methods, in order."""
    found = [child for child in getattr(node, "body", []) if isinstance(child, ast.FunctionDef)]
    return {f.name: f for f in found if not f.name.startswith("_")}


def signature(function: ast.FunctionDef) -> str:
    """Give names, order, kinds and defaults of the arguments; types differ by framework."""
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    return ast.unparse(arguments)


def is_collective(function: ast.FunctionDef) -> bool:
    return (ast.get_docstring(function) or "").startswith("Collective.")


SEAM = definitions("base.py")
OF_BACKENDS = ("Seam", "Resizable", "Probes", "TrainedParameters", "LocalSteps", "ModelFiles")


def test_both_folders_have_the_same_files():
    assert files("torch") == files("tensorflow")
    for framework, own in OWN_FILES.items():
        assert own <= all_files(framework)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_backend_adds_nothing_to_the_seam_and_says_of_a_method_that_it_is_collective(framework):
    own = methods(definitions(f"{framework}/backend.py")["Backend"])
    seam = {name: node for part in OF_BACKENDS for name, node in methods(SEAM[part]).items()}
    assert own.keys() <= seam.keys()
    for name, method in own.items():
        assert signature(method) == signature(seam[name]), name
        assert is_collective(method) == is_collective(seam[name]), name
    assert list(definitions(f"{framework}/backend.py")) == ["start", "Backend"]
    assert FRAMEWORKS[framework] in {
        getattr(node, "name", None) for node in tree(f"{framework}/backend.py").body
    }
