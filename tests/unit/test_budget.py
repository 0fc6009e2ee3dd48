"""The budget of CONTRIBUTING.md: what is counted is not above its ceiling, and no ceiling far above it."""

import ast
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
budget = import_module("budget")

COUNTS, CEILINGS = budget.count(), budget.ceilings()
LONG, SHORT, MANY = 400, 60, 25
# started by their names, which no import shows
STARTED = {
    "hvdtrain/elastic/launch.py",
}


def test_the_table_has_what_is_counted():
    assert list(CEILINGS) == list(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_counted_is_at_its_ceiling(name):
    there, most = COUNTS[name], CEILINGS[name]
    assert there <= most, "the budget is a promise: make room, or write a design record of what left for it"
    assert most <= max(there + 1, there * budget.SLACK), "python scripts/budget.py --lower"


def modules():
    return {path.relative_to(ROOT).as_posix(): path for path in budget.sources("hvdtrain")}


def importers():
    """Return which files import each file, by their paths."""
    found = defaultdict(set)
    known = modules()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvdtrain"):
                for alias in node.names:
                    for dotted in (f"{node.module}.{alias.name}", node.module):
                        if (file := dotted.replace(".", "/") + ".py") in known:
                            found[file].add(name)
                            break
    return found


def test_no_module_is_longer_than_the_limit():
    assert not {n for n, path in modules().items() if budget.length(path) > LONG}


def test_no_folder_has_more_files_than_the_limit():
    folders = defaultdict(int)
    for name in modules():
        folders[str(Path(name).parent)] += 1
    assert not {folder for folder, files in folders.items() if files > MANY}


def test_a_short_module_has_two_importers():
    known, found = modules(), importers()
    single = {
        name
        for name, path in known.items()
        if budget.length(path) < SHORT
        and len(found[name]) < 2
        and path.name not in ("__init__.py", "__main__.py")
        and not {"torch", "tensorflow"} & {*path.parts, path.stem}
    }
    assert single == STARTED
