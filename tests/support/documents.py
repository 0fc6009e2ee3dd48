"""Reading the project's documents: their code blocks, links and commands."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
_STARTS = ("horovodrun", "mpirun", "python -m hvdtrain", "python examples/")
# what a command may be for that nobody can try in a test: other hosts, a build, a set-up, a placeholder
_NOT_HERE = re.compile(r"host\d|node\d|hostfile|build-horovod|compare|prove|make |pip |--help|-np N\b|\[")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document: its language and its text without indentation."""

    language: str
    text: str


def documents() -> list[Path]:
    """Return every document of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(document: Path) -> list[Block]:
    """Return the fenced blocks of a document, in order."""
    return [
        Block(language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
        for indent, language, text in _BLOCK.findall(document.read_text(encoding="utf-8"))
    ]


def links(document: Path) -> list[str]:
    """Return the targets of a document's links, in order; what stands in code is no link."""
    text = _BLOCK.sub("", document.read_text(encoding="utf-8"))
    return _LINK.findall(re.sub(r"`[^`]*`", "`code`", text))


def commands(document: Path) -> list[list[str]]:
    """Return the words of every command in a document's shell blocks, fenced or indented; no comments."""
    text = document.read_text(encoding="utf-8")
    texts = [block.text for block in blocks(document) if block.language == "bash"]
    starts = "python -m |python examples/|horovodrun |mpirun "
    texts += re.findall(rf"^ {{4}}((?:{starts})(?:.*\\\n)*.*)$", text, re.MULTILINE)
    lines = "\n".join(texts).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def hvdtrain_commands(document: Path) -> list[list[str]]:
    """Return a document's commands that start hvdtrain, or a script of the examples."""
    return [words for words in commands(document) if " ".join(words).startswith(_STARTS)]


def can_run_here(words: list[str]) -> bool:
    """Whether a command is a job that one machine can run as it stands."""
    return not _NOT_HERE.search(" ".join(words))


def named_files(document: Path) -> dict[str, str]:
    """Return the Python blocks that say in their first line which file they are: name to text."""
    files = {}
    for block in blocks(document):
        if block.language == "python" and (match := re.match(r"# ([\w/]+\.py)\b", block.text)):
            files[match[1]] = block.text
    return files


def shortened(words: list[str], steps: int) -> tuple[str, ...]:
    """Return a documented job with a few steps in place of its length; scripts stay as they are."""
    if "hvdtrain" not in words:
        return tuple(words)
    for option in ("--epochs", "--steps"):
        if option in words:
            place = words.index(option)
            words = words[:place] + words[place + 2 :]
    return (*words, "--steps", str(steps))
