"""The tables of CONTRIBUTING.md name every folder of the package, and paths that are there."""

import re
from pathlib import Path

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
