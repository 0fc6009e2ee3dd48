"""Words that the project does not use: docstrings, comments, messages and pages are plain and literal."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
