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

_NAMES = re.compile(r"--- (?:a/(.+)|/dev/null)\n\+\+\+ b/(.+)\n")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")

# Lines that git writes between the files of a diff, and that say nothing about its effect.
_IGNORED = ("diff --git ", "index ", "new file mode ")


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
    hunks: tuple[Hunk, ...]  # in the order of their lines
    is_new: bool = False  # whether the file is created; there is one hunk then, and nothing before it


def split_lines(text: str) -> list[str]:
    """Split a text at line feeds, and only there, into lines that keep their ends."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def parse_diff(text: str) -> tuple[FileDiff, ...]:
    """Read a unified diff, as git writes it, that changes or creates files; ValueError for anything else."""
    lines = [line for line in split_lines(text) if not line.startswith(_IGNORED)]
    found: list[FileDiff] = []
    at = 0
    while at < len(lines):
        names = _NAMES.fullmatch("".join(lines[at : at + 2]))
        if names is None or names[1] not in (None, names[2]):
            raise ValueError(f'expected "--- a/FILE" and "+++ b/FILE", found {lines[at].rstrip()!r}')
        hunks: list[Hunk] = []
        at += 2
        while at < len(lines) and (place := _HUNK.match(lines[at])):
            hunk, at = _parse_hunk(lines, at, place)
            hunks.append(hunk)
        is_new = names[1] is None
        if not hunks or not all(hunk.before or is_new for hunk in hunks):
            raise ValueError(f"there is no hunk for {names[2]}, or one without lines to compare")
        found.append(FileDiff(names[2], tuple(hunks), is_new))
    if not found:
        raise ValueError("it changes no file")
    return tuple(found)


def _parse_hunk(lines: Sequence[str], at: int, place: re.Match[str]) -> tuple[Hunk, int]:
    """Read the hunk whose title is at an index; also return the index after it."""
    counts = int(place[2] or 1), int(place[3] or 1)
    before: list[str] = []
    after: list[str] = []
    while len(before) < counts[0] or len(after) < counts[1]:
        at += 1
        line = lines[at] if at < len(lines) else ""
        if line[:1] not in (" ", "-", "+") or not line.endswith("\n"):
            raise ValueError(f"{place[0]} ends too early, at {line!r}")
        if line[0] != "+":
            before.append(line[1:])
        if line[0] != "-":
            after.append(line[1:])
    if (len(before), len(after)) != counts:
        raise ValueError(f"the counts of lines in {place[0]} are wrong")
    return Hunk(place[0], max(1, int(place[1])), tuple(before), tuple(after)), at + 1


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


# Folders below patches/, in the order in which they are applied.
SETS = ("build", "launcher")

_OTHER_SOURCE = "This is not the source of Horovod that the patches were made for."


@dataclass(frozen=True)
class Patch:
    """One patch for Horovod's source."""

    name: str  # the set and the file without its ending, e.g. "build/0001-cxx17"
    subject: str  # what it does
    # of the build set, when Horovod does not compile or start without it: "always", "with Open MPI 5", "no";
    # empty in the launcher set
    needed: str
    why: str  # what goes wrong without it
    upstream: str  # issues or pull requests about the same thing, or "none found"
    diff: str  # the unified diff, without the header
    files: tuple[FileDiff, ...]  # the diff, parsed


@functools.cache
def horovod_patches() -> tuple[Patch, ...]:
    """Read all patches, in the order in which they are applied."""
    patches: list[Patch] = []
    for name in SETS:
        folder = files(__package__) / "patches" / name
        found = [file for file in folder.iterdir() if file.name.endswith(".patch")] if folder.is_dir() else []
        if not found:
            raise HorovodBuildError(
                f"This installation of hvdtrain has no patches for Horovod ({folder}).",
                "Install hvdtrain again.",
            )
        for file in sorted(found, key=lambda file: file.name):
            text = file.read_bytes().decode("utf-8")
            patches.append(parse_patch(f"{name}/{file.name.removesuffix('.patch')}", text))
    return tuple(patches)


def parse_patch(name: str, text: str) -> Patch:
    """Read one patch: a header of the form "Name: value", an empty line, and a unified diff.

    In the header, lines that begin with a space continue the one above. An error names what is missing.
    """
    header, _, diff = text.partition("\n\n")
    fields = {key: " ".join(str(value).split()) for key, value in HeaderParser().parsestr(header).items()}
    expected = ["Subject", *(["Needed"] if name.startswith("build/") else []), "Why", "Upstream"]
    if list(fields) != expected or not all(fields.values()):
        raise HorovodBuildError(f"Patch {name}: its header must have the fields {', '.join(expected)}.")
    try:
        changes = parse_diff(diff)
    except ValueError as error:
        raise HorovodBuildError(f"Patch {name} is malformed: {error}.") from error
    needed = fields.get("Needed", "")
    return Patch(name, fields["Subject"], needed, fields["Why"], fields["Upstream"], diff, changes)


def patches_digest(patches: Sequence[Patch]) -> str:
    """Compute twelve hex digits that change if what the patches do to the source changes."""
    return hashlib.sha256("\0".join(patch.diff for patch in patches).encode()).hexdigest()[:12]


def apply_patches(source: Path, patches: Sequence[Patch]) -> None:
    """Apply patches to the source tree, in order.

    Every patch is compared with the source before any file is written. If one does not match, an error names
    it, and the source stays as it is.
    """
    texts: dict[str, str] = {}
    for patch in patches:
        for diff in patch.files:
            file, place = diff.file, source / diff.file
            if diff.is_new and (file in texts or place.exists()):
                problem = f"Patch {patch.name} creates {file}, which exists already."
                raise HorovodBuildError(problem, _OTHER_SOURCE)
            try:
                # as bytes: line ends stay as they are
                text = texts[file] if file in texts else "" if diff.is_new else place.read_bytes().decode()
                texts[file] = apply_hunks(text, diff.hunks)
            except FileNotFoundError as error:
                problem = f"Patch {patch.name}: Horovod's source has no file {file}."
                raise HorovodBuildError(problem, _OTHER_SOURCE) from error
            except ValueError as error:
                raise HorovodBuildError(
                    f"Patch {patch.name} does not match {file}: {error}.", _OTHER_SOURCE
                ) from error
    for file, text in texts.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes(text.encode("utf-8"))
