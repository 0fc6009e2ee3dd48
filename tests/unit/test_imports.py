"""The direction of imports: read from the source, so that nothing needs to be loaded."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hvdtrain

ROOT = Path(hvdtrain.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod", "mpi4py", "torchvision", "jax"}

# from the lowest layer to the highest; a module imports its own layer or lower ones
LAYERS = [
    ["errors", "quiet", "threads", "addresses", "deadline", "summary", "logs", "best", "forms"],
    ["patience"],
    ["record"],
    ["schedule", "terminal", "task", "horovod_build", "hosts"],
    ["hostcheck"],
    ["config", "environment", "data", "models", "tasks"],
    [
        "backends.base",
        "backends._averaging",
        "backends._exchange",
        "backends._large_batch",
        "backends._names",
        "backends._workers",
        "backends._objective",
    ],
    ["metrics", "replicas", "cluster", "ending", "watch", "checkpoint", "backends"],
    ["report"],
    ["saving"],
    ["rundir", "session", "compare"],
    ["starting"],
    ["skipped"],
    ["plan", "loop"],
    ["opening", "recorded"],
    ["job", "evaluation", "export", "importing", "doctor"],
    ["cli"],
    ["__main__"],
]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def imports(name: str, top_only: bool) -> frozenset[str]:
    """Give the full names that a module imports; at its top only, or in its functions, too.

    Imports for type checkers are left out.
    """
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    return frozenset(_imports(tree, top_only))


def _imports(node: ast.AST, top_only: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif not (top_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from _imports(child, top_only)


def frameworks(name: str, top_only: bool) -> set[str]:
    return {full.partition(".")[0] for full in imports(name, top_only)} & FRAMEWORKS


def internal(name: str, top_only: bool = False) -> set[str]:
    """Give the modules of hvdtrain that a module imports."""
    found = set()
    for full in imports(name, top_only):
        head, _, rest = full.partition(".")
        if head == "hvdtrain":
            while rest and rest not in MODULES:
                rest = rest.rpartition(".")[0]
            found.add(rest)
    return found - {name, ""}  # "" is the package itself, which imports nothing


def layer(name: str) -> int:
    """Give a module's layer; a module that has none of its own is in its package's."""
    while True:
        for height, names in enumerate(LAYERS):
            if name in names:
                return height
        assert "." in name, f"{name} has no layer: give it one in LAYERS"
        name = name.rpartition(".")[0]


def owner(name: str) -> str | None:
    """Give the framework that a backend module may import."""
    file = name.removeprefix("backends.")
    if file == name:
        return None
    if file == "torch" or file.startswith("_torch_"):
        return "torch"
    return "tf" if file == "tensorflow" or file.startswith("_keras_") else None


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_imports_go_down_the_layers(name):
    upward = {other for other in internal(name) if layer(other) > layer(name)}
    assert upward == set()


def test_imports_have_no_cycles():
    TopologicalSorter({name: internal(name) for name in MODULES}).prepare()


def test_the_package_itself_imports_nothing_of_its_own():
    assert {full for full in imports("", top_only=True) if full.startswith("hvdtrain")} == set()


@pytest.mark.parametrize("name", ["loop", "session", "report", "metrics", "replicas", "cluster", "plan"])
def test_the_shared_part_never_imports_a_concrete_backend(name):
    reached, waiting = set(), {name}
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting |= internal(module) - reached
    assert {module for module in reached if owner(module)} == set()


@pytest.mark.parametrize("name", ["loop", "session", "report", "metrics", "replicas", "cluster", "plan"])
def test_the_shared_part_names_no_framework(name):
    assert frameworks(name, top_only=False) == set()


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("backends.")])
def test_a_backend_imports_neither_the_loop_nor_what_runs_it(name):
    assert internal(name) & {"loop", "session", "report", "job", "plan", "cli", "rundir"} == set()


@pytest.mark.parametrize("name", [name for name in MODULES if owner(name)])
def test_a_backend_does_not_import_the_other(name):
    assert {owner(other) for other in internal(name)} <= {owner(name), None}


@pytest.mark.parametrize("name", [name for name in MODULES if owner(name) is None])
def test_only_backends_import_frameworks_at_the_top(name):
    assert frameworks(name, top_only=True) == set()


@pytest.mark.parametrize("name", [name for name in MODULES if owner(name)])
def test_a_backend_imports_its_own_framework_only(name):
    allowed = {"torch": ("torch", "horovod.torch"), "tf": ("tensorflow", "keras", "horovod.tensorflow")}[
        owner(name)
    ]
    foreign = {
        full
        for full in imports(name, top_only=False)
        if full.partition(".")[0] in FRAMEWORKS and not any(f"{full}.".startswith(f"{a}.") for a in allowed)
    }
    assert foreign == set()


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in MODULES
        if owner(n) is None and n.partition(".")[0] not in ("tasks", "models", "horovod_build", "doctor")
    ],
)
def test_frameworks_are_imported_in_functions_of_tasks_and_models_only(name):
    assert frameworks(name, top_only=False) == set()


def test_the_reader_of_imports_sees_what_is_there():
    """Otherwise every test above would pass for nothing."""
    assert frameworks("backends.torch", top_only=True) == {"torch", "horovod"}
    assert frameworks("backends.tensorflow", top_only=True) >= {"tensorflow", "keras", "horovod"}
    assert frameworks("models.convnet", top_only=False) == {"torch", "keras"}
    assert "backends" in internal("opening")
    assert "job" in internal("cli")
    assert "job" not in internal("cli", top_only=True)
    assert "session" not in internal("report")
