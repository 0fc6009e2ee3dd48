"""What the import contracts of setup.cfg cannot say: where in a file an import stands, and what lacks a row.

The contracts themselves (layers, rings, frameworks) are checked by `lint-imports`, in `make check`.
"""

import ast
import configparser
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from support.documents import ROOT

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod", "mpi4py", "torchvision", "jax"}
# the parts that may import a framework or Horovod at the top of a file
OWNERS = (
    *(
        f"hvdtrain.{part}.{name}."
        for part in ("backends", "tools", "tools.parity")
        for name in ("torch", "tensorflow")
    ),
    *("hvdtrain.elastic.driver.host_job.", "hvdtrain.elastic.driver.clusters."),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_at_the_top(node: ast.AST) -> Iterator[str]:
    """Return the full names that a file imports outside of its functions, and not for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield str(child.module)
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.expr) and not (
            isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        ):
            yield from imported_at_the_top(child)


def test_frameworks_are_imported_in_functions_outside_of_the_backends():
    for module, path in MODULES.items():
        if not f"{module}.".startswith(OWNERS):
            names = imported_at_the_top(ast.parse(path.read_text(encoding="utf-8")))
            assert not {name.partition(".")[0] for name in names} & FRAMEWORKS, module


def imported_anywhere(path: Path) -> Iterator[str]:
    """Return the modules of hvdtrain that a file imports, in functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & MODULES.keys()
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)


def test_no_folders_and_files_import_each_other_in_a_circle_types_included():
    graphs = defaultdict(lambda: defaultdict(set))  # of the folders and files in each folder
    for module, path in MODULES.items():
        for imported in imported_anywhere(path):
            one, other = module.split("."), imported.split(".")
            pairs = enumerate(zip(one, other, strict=False))
            shared = next((count for count, (a, b) in pairs if a != b), None)
            if shared is not None:  # else one of them is the folder of the other
                graphs[".".join(one[:shared])][one[shared]].add(other[shared])
    for graph in graphs.values():
        TopologicalSorter(graph).prepare()


def test_every_package_stands_in_a_layer():
    setup = configparser.ConfigParser()
    setup.read(PACKAGE.parent / "setup.cfg", encoding="utf-8")
    layers = setup["importlinter:contract:layers"]["layers"].replace("|", " ").replace(":", " ").split()
    packages = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    assert packages <= set(layers), "give a new package its layer in setup.cfg"


def test_what_programs_beside_the_package_import_of_it_is_there():
    missing = []
    for path in [
        one for name in ("benchmarks", "examples", "scripts") for one in (ROOT / name).rglob("*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            module = (isinstance(node, ast.ImportFrom) and node.module) or ""
            if module.partition(".")[0] == "hvdtrain":
                found = set(re.findall(r"\w+", MODULES[module].read_text()))
                names = [one.name for one in node.names if f"{module}.{one.name}" not in MODULES]
                missing += [(path.name, one) for one in names if one not in found]
    assert missing == []
