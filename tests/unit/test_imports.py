"""What the import contracts of setup.cfg cannot say: where in a file an import stands, and what lacks a row.

The contracts themselves (layers, rings, frameworks) are checked by `lint-imports`, in `make check`.
"""

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

from support.documents import ROOT

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod", "mpi4py", "torchvision", "jax"}
# The parts that may import a framework or Horovod at the top of a file, and what they may import of it
OWNERS = {
    "hvdtrain.backends.torch": ("torch", "horovod.torch"),
    "hvdtrain.backends.tensorflow": ("tensorflow", "keras", "horovod.tensorflow"),
    "hvdtrain.tools.torch": ("torch", "horovod.torch"),
    "hvdtrain.tools.tensorflow": ("tensorflow", "keras", "horovod.tensorflow"),
    "hvdtrain.tools.parity.torch": ("torch",),
    "hvdtrain.tools.parity.tensorflow": ("tensorflow", "keras"),
    "hvdtrain.elastic.driver.host_job": ("horovod.runner",),
    "hvdtrain.elastic.driver.clusters": ("horovod.runner",),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _imports(node: ast.AST, top_only: bool) -> Iterator[str]:
    """Return the full names that a file imports: in the whole file, or outside of its functions."""
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


def is_in(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def owner_of(module: str) -> str | None:
    """Return the part with a framework or Horovod that a module belongs to."""
    return next((package for package in OWNERS if is_in(module, package)), None)


def frameworks(module: str, top_only: bool = False) -> set[str]:
    """Return what a module imports of frameworks and Horovod."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return {name for name in _imports(tree, top_only) if name.partition(".")[0] in FRAMEWORKS}


def test_frameworks_are_imported_in_functions_outside_of_the_backends():
    found = {module: frameworks(module, top_only=True) for module in MODULES if not owner_of(module)}
    assert {module: names for module, names in found.items() if names} == {}


def test_each_imports_its_own_part_of_horovod():
    """Contracts know of other packages no more than the first word: horovod, not horovod.torch."""
    foreign = {
        module: {name for name in frameworks(module) if not any(is_in(name, own) for own in OWNERS[owner])}
        for module in MODULES
        if (owner := owner_of(module))
    }
    assert {module: names for module, names in foreign.items() if names} == {}


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
