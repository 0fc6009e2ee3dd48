"""The patches for Horovod's source: reading them, applying them, telling one version from another.

They are files of this package, in two sets. The build set is what Horovod needs to compile and to
start on current frameworks; the launcher set changes horovodrun. Each file is a unified diff below
a header, and applies to the source as the files before it leave it.
"""

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.resources import files
from pathlib import Path

from hvdtrain.errors import HorovodBuildError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """One changed place of a file."""

    title: str  # its position as in the diff, e.g. "@@ -18,3 +18,3 @@"
    start: int  # number of its first line in the unchanged file, from 1
    before: tuple[str, ...]  # the lines there, each with its line end
    after: tuple[str, ...]  # the lines that replace them


@dataclass(frozen=True)
class FileDiff:
    """The changes of one file."""

    file: str  # its path below the root of the source tree
    hunks: list[Hunk]  # in the order of their lines
    is_new: bool  # whether the file is created; there is one hunk then, and nothing before it


def split_lines(text: str) -> list[str]:
    """Split a text at line feeds, and only there, into lines that keep their ends."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def parse_diff(text: str) -> list[FileDiff]:
    """Read a unified diff that changes or creates files."""
    found: list[FileDiff] = []
    lines = iter(split_lines(text))
    for line in lines:
        if line.startswith("--- "):
            name = next(lines).removeprefix("+++ b/").rstrip("\n")
            found.append(FileDiff(name, [], is_new=line == "--- /dev/null\n"))
        elif place := _HUNK.match(line):
            counts = int(place[2] or 1), int(place[3] or 1)
            before: list[str] = []
            after: list[str] = []
            while len(before) < counts[0] or len(after) < counts[1]:
                changed = next(lines)
                if changed[0] != "+":
                    before.append(changed[1:])
                if changed[0] != "-":
                    after.append(changed[1:])
            found[-1].hunks.append(Hunk(place[0], max(1, int(place[1])), tuple(before), tuple(after)))
    return found


def apply_hunks(text: str, hunks: Sequence[Hunk]) -> str:
    """Return the text of a file with hunks applied; ValueError if one finds other lines at its position."""
    lines = split_lines(text)
    result: list[str] = []
    done = 0
    for hunk in hunks:
        first = hunk.start - 1
        for number, expected in enumerate(hunk.before, first):
            found = repr(lines[number]) if number < len(lines) else ""
            if found != repr(expected):
                what = f"found {found}" if found else "the file ends before it"
                raise ValueError(f"hunk {hunk.title} differs at line {number + 1}; {what}")
        result += [*lines[done:first], *hunk.after]
        done = first + len(hunk.before)
    return "".join([*result, *lines[done:]])


@dataclass(frozen=True)
class Patch:
    """One patch for Horovod's source."""

    name: str  # the set and the file without its ending, e.g. "build/0001-cxx17"
    header: dict[str, str]  # Subject, Why, Upstream, and of the build set Needed
    diff: str  # the unified diff, without the header
    files: list[FileDiff]  # the diff, parsed


@functools.cache
def horovod_patches() -> tuple[Patch, ...]:
    """Read all patches, in the order in which they are applied."""
    patches = []
    for name in ("build", "launcher"):
        folder = files(__package__) / "patches" / name
        found = [file for file in folder.iterdir() if file.name.endswith(".patch")] if folder.is_dir() else []
        if not found:
            raise HorovodBuildError(
                f"There are no patches for Horovod in {folder}.",
                "This installation of hvdtrain is damaged: install it again.",
            )
        for file in sorted(found, key=lambda file: file.name):
            text = file.read_bytes().decode("utf-8")
            patches.append(parse_patch(f"{name}/{file.name.removesuffix('.patch')}", text))
    return tuple(patches)


def parse_patch(name: str, text: str) -> Patch:
    """Read one patch: a header, lines of which may be continued, an empty line, and a unified diff."""
    header, _, diff = text.partition("\n\n")
    fields = {key: " ".join(str(value).split()) for key, value in HeaderParser().parsestr(header).items()}
    return Patch(name, fields, diff, parse_diff(diff))


def patches_digest(patches: Sequence[Patch]) -> str:
    """Compute twelve hex digits that change if what the patches do to the source changes."""
    return hashlib.sha256("\0".join(patch.diff for patch in patches).encode()).hexdigest()[:12]


def apply_patches(source: Path, patches: Sequence[Patch]) -> None:
    """Apply patches to the source tree, in order; if one does not match, the source stays as it is."""
    texts: dict[str, str] = {}
    for patch in patches:
        for diff in patch.files:
            place = source / diff.file
            try:
                if diff.is_new and (diff.file in texts or place.exists()):
                    raise ValueError("it exists already")
                if diff.file not in texts:  # as bytes: line ends stay as they are
                    texts[diff.file] = "" if diff.is_new else place.read_bytes().decode()
                texts[diff.file] = apply_hunks(texts[diff.file], diff.hunks)
            except (FileNotFoundError, ValueError) as error:
                raise HorovodBuildError(
                    f"Patch {patch.name} does not match {diff.file}: {error}.",
                    "This is not the source of Horovod that the patches were made for.",
                ) from error
    for file, text in texts.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes(text.encode("utf-8"))
