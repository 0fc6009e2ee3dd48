"""The documents say what the code does: fields, defaults, options, files."""

import re
from typing import Any

import pytest
from support.documents import ROOT, documents, hvdtrain_commands, links, named_files

from hvdtrain.cli import cli
from hvdtrain.cli.jobs import OPTIONS
from hvdtrain.config import Config

# horovodrun's and mpirun's options in the documents, and how many words each takes
LAUNCHER_OPTIONS = {
    "horovodrun": {
        **dict.fromkeys(("-np", "-H", "-hostfile", "--hostfile", "--min-np", "--max-np"), 1),
        "--host-discovery-script": 1,
        "--mpi": 0,
        "--gloo": 0,
    },
    "mpirun": {"-np": 1, "-H": 1, "--bind-to": 1, "--map-by": 1, "--hostfile": 1, "-x": 1},
}


def by_name(document):
    return str(document.relative_to(ROOT))


def _as_yaml(value: Any) -> str:
    """Say a default as a config file would hold it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return str(list(value) if isinstance(value, tuple) else value)


def test_config_page_lists_every_field_with_its_default():
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `--(.*?)` \| (.*?) \| (.*?) \| (.*) \|$", text, re.MULTILINE)
    assert [row[0] for row in rows] == list(Config.model_fields)
    for name, set_by, kind, default, meaning in rows:
        field = Config.model_fields[name]
        assert set_by == (name.replace("_", "-") if name in OPTIONS else f"set {name}=..."), name
        assert default == ("none: must be given" if field.is_required() else f"`{_as_yaml(field.default)}`")
        assert meaning == field.description.replace("|", "\\|"), name
        of_a_type = {f"`{choice}`" for choice in re.findall(r"Literal\['(.*?)'\]", str(field.annotation))}
        of_a_type = {"`, `".join(re.split("', '", one)) for one in of_a_type}
        for limit in field.metadata:
            for key, sign in {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}.items():
                if (value := getattr(limit, key, None)) is not None:
                    of_a_type.add(f"{sign} {'2**63' if value == 2**63 else value}")
        assert not [said for said in of_a_type if said not in kind], f"{name}: {of_a_type} in {kind}"


@pytest.mark.parametrize("document", documents(), ids=by_name)
def test_links_resolve(document):
    for link in links(document):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{by_name(document)} links to {link}"
        assert not anchor or anchor in _anchors(target), f"{by_name(document)} links to {link}"


def _anchors(document: Any) -> set[str]:
    """Give the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", documents(), ids=by_name)
def test_files_named_in_documents_exist(document):
    text = document.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:hvdtrain|tests|examples|docs|scripts|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists(), f"{by_name(document)} names {path}"


def test_modules_named_in_documents_exist():
    """A document names a module by its path, or by the end of it; pages on Horovod name Horovod's."""
    known = {
        f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[a-z]*/**/*.py") if ".venv" not in path.parts
    }
    for document in [*documents(), *(ROOT / "docs" / "design").glob("*.md")]:
        for name in re.findall(r"`([\w/]+\.py)`", document.read_text(encoding="utf-8")):
            is_there = any(path.endswith(f"/{name}") for path in known)
            assert is_there or name.startswith("horovod/"), f"{by_name(document)} names {name}"


@pytest.mark.parametrize("document", documents(), ids=by_name)
def test_commands_parse(document):
    for words in hvdtrain_commands(document):
        rest = _after_the_launcher(words)
        if rest[:3] != ["python", "-m", "hvdtrain"]:
            assert rest[0] == "python", words
            assert (ROOT / rest[1]).exists() or rest[1] in named_files(document), words
        elif "[" not in " ".join(rest):  # a pattern with [CONFIG.yaml] is not a command
            _parse(rest[3:])


def _after_the_launcher(words: list[str]) -> list[str]:
    """Take the launcher and its options off a command; they must be ones that exist."""
    known = LAUNCHER_OPTIONS.get(words[0])
    if known is None:
        return words
    words, launcher = words[1:], words[0]
    while words[0].startswith("-"):
        assert words[0] in known, f"{launcher} {words[0]}"
        words = words[1 + known[words[0]] :]
    return words


def _parse(words: list[str]) -> None:
    """Parse a command line of hvdtrain and run nothing; train may be left out."""
    name, rest = (words[0], words[1:]) if words[0] in cli.commands else ("train", words)
    if "--help" not in rest:
        cli.commands[name].make_context(name, list(rest), **cli.context_settings)
