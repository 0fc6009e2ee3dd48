"""The two backends, side by side: the same names in the same order, as the interface has them."""

import ast
import re
from pathlib import Path

import pytest

import hvdtrain

FOLDER = Path(hvdtrain.__file__).parent / "backends"
FILES = ("base", "torch", "tensorflow", "_torch_batches", "_keras_batches")
TREES = {name: ast.parse((FOLDER / f"{name}.py").read_text()) for name in FILES}
BACKENDS = {"torch": "TorchBackend", "tensorflow": "TensorFlowBackend"}


def class_of(file: str, name: str) -> ast.ClassDef:
    (found,) = [node for node in TREES[file].body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Give a class's public methods and its constructor, in order."""
    found = [child for child in node.body if isinstance(child, ast.FunctionDef)]
    return {f.name: f for f in found if not f.name.startswith("_") or f.name == "__init__"}


def signature(function: ast.FunctionDef) -> str:
    """Give names, order, kinds and defaults of the arguments; types differ by framework."""
    arguments = function.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    return ast.unparse(arguments)


def public_names(file: str) -> list[str]:
    """Give public classes and functions in order, without the framework's name in front."""
    nodes = [node for node in TREES[file].body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [
        re.sub(r"^(Torch|TensorFlow|Keras)(?=[A-Z])", "", n.name) for n in nodes if not n.name.startswith("_")
    ]


INTERFACE = {name: f for name, f in methods(class_of("base", "Backend")).items() if name != "__init__"}


def test_both_files_define_the_same_public_names_in_the_same_order():
    assert public_names("torch") == public_names("tensorflow")
    assert public_names("torch")[-1] == "Backend"


@pytest.mark.parametrize("file", BACKENDS)
def test_a_backend_has_the_methods_of_the_interface_in_its_order(file):
    own = [name for name in methods(class_of(file, BACKENDS[file])) if name != "__init__"]
    assert own == list(INTERFACE)


@pytest.mark.parametrize("method", INTERFACE)
@pytest.mark.parametrize("file", BACKENDS)
def test_a_method_takes_what_the_interface_says(file, method):
    assert signature(methods(class_of(file, BACKENDS[file]))[method]) == signature(INTERFACE[method])


@pytest.mark.parametrize("method", INTERFACE)
@pytest.mark.parametrize("file", BACKENDS)
def test_collective_methods_say_so_in_both_backends(file, method):
    said = [ast.get_docstring(f).startswith("Collective.") for f in
            (methods(class_of(file, BACKENDS[file]))[method], INTERFACE[method])]  # fmt: skip
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("file", "name"), [("_torch_batches", "TorchPending"), ("_keras_batches", "KerasPending")]
)
def test_pending_metrics_have_the_methods_of_the_interface(file, name):
    own = {name: signature(f) for name, f in methods(class_of(file, name)).items() if name != "__init__"}
    assert own == {name: signature(f) for name, f in methods(class_of("base", "PendingMetrics")).items()}


def test_both_have_their_private_parts_in_files_of_the_same_names():
    parts = {
        prefix: sorted(path.stem.removeprefix(prefix) for path in FOLDER.glob(f"{prefix}*.py"))
        for prefix in ("_torch_", "_keras_")
    }
    assert set(parts["_torch_"]) <= set(parts["_keras_"])
