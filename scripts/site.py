"""Hooks of MkDocs: README.md as the first page, files that pages name, a page of the functions and classes.

A page of docs/ links to files of the project as it does on a code host. In the site, those below docs/ are
pages, and the others become pages with their text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

import hvdtrain

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
IMAGES = (".svg", ".png")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash", ".ipynb": "json"}
PAGES = {"README.md": "index.md", "README.zh-CN.md": "index.zh-CN.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, the reference, the list of design records, and every file that a page links to."""
    design = sorted((ROOT / "docs/design").glob("*.md"))
    rows = [f"- [{path.read_text().splitlines()[0].lstrip('# ')}]({path.name})" for path in design]
    _add(files, config, "design/index.md", "\n".join(["# Design decisions", "", *rows]))
    _add(files, config, "reference.md", _reference())
    found = [ROOT / name for name in PAGES]
    for path in found:
        _add(files, config, PAGES[path.name], _linked(path))
    found += (ROOT / "docs").rglob("*.md")
    seen = set(found)
    while found:
        for target in _targets(found.pop()):
            if target not in seen and not target.is_relative_to(ROOT / "docs"):
                seen.add(target)
                _add(files, config, _place(target), _text(target))
                if target.suffix == ".md":
                    found.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page of docs/ lead to pages of the site."""
    path = ROOT / "docs" / page.file.src_uri
    return _linked(path, markdown) if path.is_file() else markdown


def _add(files: Files, config: Any, place: str, text: str) -> None:
    files.append(File.generated(config, place, content=text, inclusion=InclusionLevel.INCLUDED))


def _targets(path: Path) -> list[Path]:
    """Return the files and folders of the project that a Markdown file links to."""
    words = [match[1] for match in LINK.finditer(path.read_text())]
    targets = [Path(posixpath.normpath(path.parent / word)) for word in words]
    return [target for target in targets if target.exists() and target.suffix not in IMAGES]


def _place(target: Path) -> str:
    """Return where a file of the project is in the site."""
    name = target.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if name == "docs":
        return "index.md"
    if name.startswith("docs/"):
        return name.removeprefix("docs/") + ("/index.md" if target.is_dir() else "")
    return f"source/{name}" + ("" if name.endswith(".md") else ".md")


def _linked(path: Path, text: str | None = None) -> str:
    """Return the text of a Markdown file with links from its place in the site."""
    start = posixpath.dirname(_place(path))

    def replace(match: re.Match[str]) -> str:
        target = Path(posixpath.normpath(path.parent / match[1]))
        if not target.exists():
            return match[0]
        return posixpath.relpath(_place(target), start or ".") + (match[2] or "")

    return LINK.sub(replace, path.read_text() if text is None else text)


def _text(target: Path) -> str:
    """Return the page of a file or folder."""
    name = target.relative_to(ROOT).as_posix()
    if target.suffix == ".md":
        return _linked(target)
    if target.is_dir():
        parts = [
            path for path in sorted(target.rglob("*")) if path.is_file() and "__pycache__" not in path.parts
        ]
        return "\n\n".join([f"# {name}/", *(_block(part, "## ") for part in parts)])
    return _block(target, "# ")


def _block(path: Path, heading: str) -> str:
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return f"{heading}{path.relative_to(ROOT)}\n\n{path.stat().st_size:,} bytes"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    language = LANGUAGES.get(path.suffix, "")
    return f"{heading}{path.relative_to(ROOT)}\n\n{fence}{language}\n{text.rstrip()}\n{fence}"


def _reference() -> str:
    """Return the page of what ``import hvdtrain`` gives; mkdocstrings reads the docstrings."""
    names = [name for name in hvdtrain.__all__ if name in hvdtrain._HOMES]
    functions = [name for name in names if name.islower()]
    classes = [name for name in names if not name.islower()]
    entries = [f"::: {hvdtrain._HOMES[name]}.{name}" for name in (*functions, *classes)]
    head = "# Python\n\nWhat `import hvdtrain` gives. [From Python](python.md) shows it in use."
    options = "    options:\n      heading_level: 3\n      show_root_heading: false"
    return "\n\n".join([head, *entries, f"## Errors\n\n::: hvdtrain.errors\n{options}"])
