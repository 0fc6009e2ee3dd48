"""Counts the code against its budget: the table in CONTRIBUTING.md, which tests/unit/test_budget.py keeps.

    python scripts/budget.py                # what is there, and what may be there
    python scripts/budget.py --lower        # lowers the ceilings in CONTRIBUTING.md to what is there

A ceiling is raised by hand alone, with a design record that names what left for it.
"""

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator, Sequence
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
SLACK = 1.03  # a ceiling above this share of what is there is lowered
BEGIN, END = "<!-- budget -->", "<!-- /budget -->"


def sources(folder: str) -> list[Path]:
    """Return the Python files below a folder that belong to the project."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{folder}/*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return [ROOT / name for name in sorted(set(names)) if (ROOT / name).is_file()]


def length(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text().splitlines())


def count() -> dict[str, int]:
    """Return what the budget counts, by the words of its table."""
    package = sources("hvdtrain")
    counts = {"lines of `hvdtrain/`": sum(map(length, package)), "modules": len(package)}
    top = [path for path in package if path.parent == ROOT / "hvdtrain" and not path.name.startswith("__")]
    counts["modules at the top"] = len(top)
    for folder in sorted({p.relative_to(ROOT / "hvdtrain").parts[0] for p in package if p not in top}):
        if not folder.endswith(".py"):
            of_folder = [p for p in package if p.relative_to(ROOT / "hvdtrain").parts[0] == folder]
            counts[f"lines of `{folder}/`"] = sum(map(length, of_folder))
            counts[f"modules of `{folder}/`"] = len(of_folder)
    counts["fields of `Session`"] = len(_fields("session.py", "Session"))
    config = "config/__init__.py" if (ROOT / "hvdtrain/config").is_dir() else "config.py"
    counts["fields of `Config`"] = len(_fields(config, "Config"))
    seam = _class("backends/base.py", "Seam").body
    counts["methods of the seam"] = sum(isinstance(node, ast.FunctionDef) for node in seam)
    counts["lines of `loop.py`"] = length(ROOT / "hvdtrain/loop.py")
    run = next(n for n in _tree("loop.py").body if isinstance(n, ast.FunctionDef) and n.name == "run")
    first = run.body[1] if ast.get_docstring(run) else run.body[0]
    counts["lines of its `run`, without the docstring"] = (run.end_lineno or 0) - first.lineno + 1
    counts["layers of the import contract"] = len(_layers())
    counts["lines of `tests/`"] = sum(map(length, sources("tests")))
    return counts


def ceilings() -> dict[str, int]:
    """Return the ceilings of the table in CONTRIBUTING.md, by its words."""
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \|$", _table(), flags=re.MULTILINE)
    return {name: int(number.replace(",", "")) for name, number in rows}


def written(numbers: dict[str, int]) -> str:
    """Return a table of ceilings as CONTRIBUTING.md has it."""
    rows = [f"| {name} | {number:,} |" for name, number in numbers.items()]
    return "\n".join([BEGIN, "| counted | at most |", "|---|---|", *rows, END])


def _table() -> str:
    text = PAGE.read_text()
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def _tree(name: str) -> ast.Module:
    return ast.parse((ROOT / "hvdtrain" / name).read_text())


def _class(file: str, name: str) -> ast.ClassDef:
    return next(n for n in _tree(file).body if isinstance(n, ast.ClassDef) and n.name == name)


def _fields(file: str, name: str) -> Sequence[ast.AnnAssign]:
    body = _class(file, name).body
    return [n for n in body if isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.dump(n)]


def _layers() -> list[str]:
    parser = ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    return parser["importlinter:contract:layers"]["layers"].split("\n")[1:]


def rows() -> Iterator[str]:
    """Return the lines of a table with what is there beside each ceiling."""
    allowed = ceilings()
    yield f"{'counted':45} {'there':>8} {'at most':>8}"
    for name, number in count().items():
        yield f"{name:45} {number:8,} {allowed.get(name, 0):8,}"


def main() -> None:
    """Print the counts; lower the ceilings if that is wanted."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--lower", action="store_true", help="lower the ceilings in CONTRIBUTING.md")
    if parser.parse_args().lower:
        allowed, there = ceilings(), count()
        lowered = {name: min(number, allowed.get(name, number)) for name, number in there.items()}
        PAGE.write_text(PAGE.read_text().replace(_table(), written(lowered)))
    print("\n".join(rows()))


if __name__ == "__main__":
    main()
