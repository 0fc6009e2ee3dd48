"""CONTRIBUTING.md names every folder of the package; docstrings, messages and pages have plain words."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import hvdtrain

ROOT = Path(__file__).parents[2]
PACKAGE = Path(hvdtrain.__file__).parent


def test_the_table_names_every_folder_of_the_package():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page[page.index("## Where things live") : page.index("## Rules of the seam")]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    found = [path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("__init__.py")]
    folders = {f"{folder.as_posix()}/" for folder in found}
    assert {path for path in named if path.startswith("hvdtrain/")} == folders
    assert len(named) == len(set(named))
    assert not [path for path in named if not (ROOT / path).exists()]


LEFT = re.compile(
    r"\b(told|asked|beside|dealt|dealing|heirs?|heritage|go(es)? on|in words|what came of|where it stands)\b",
    re.I,
)
PAGES = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def texts(path):
    """Yield the comments and strings of a module with their lines."""
    source = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize("package", sorted(path.name for path in (ROOT / "hvdtrain").iterdir()))
def test_modules_are_without_words_that_left(package):
    place = ROOT / "hvdtrain" / package
    files = place.rglob("*.py") if place.is_dir() else [place] if place.suffix == ".py" else []
    found = {
        f"{file}:{line}": word[0]
        for file in files
        for line, text in texts(file)
        if (word := LEFT.search(text))
    }
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_without_words_that_left(page):
    lines = enumerate(page.read_text().splitlines(), 1)
    # the rows of Horovod's patches are those patches' own headers
    found = {
        line: word[0] for line, text in lines if (word := LEFT.search(text)) and not text.startswith("| `00")
    }
    assert not found
