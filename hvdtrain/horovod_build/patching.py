"""The patches for Horovod's source: reading them, applying them, telling one version from another.

They are files of this package, in two sets. The build set is what Horovod needs to compile and to
start on current frameworks; the launcher set changes horovodrun. Each file is a unified diff below
a header, and applies to the source as the files before it leave it.
"""

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.resources import files
from pathlib import Path, PurePosixPath

from hvdtrain.errors import HorovodBuildError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")

# Lines that git writes between the files of a diff, and that say nothing about its effect.
_IGNORED = ("diff --git ", "index ", "new file mode ")


class HunkMismatch(Exception):
    """A hunk does not match the file that it is applied to."""

    def __init__(self, hunk: "Hunk", line: int, found: str | None) -> None:
        super().__init__(f"{hunk.title} does not match line {line}")
        self.hunk = hunk
        self.line = line
        self.found = found


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
    """Read a unified diff that changes or creates files.

    Returns one entry for each file.

    Raises ValueError if the text is anything else, if a hunk of a file has no line to compare with it, or if
    positions or counts of lines contradict one another.
    """
    lines = [line for line in split_lines(text) if not line.startswith(_IGNORED)]
    found: list[FileDiff] = []
    at = 0
    while at < len(lines):
        diff, at = _parse_file(lines, at)
        found.append(diff)
    names = [diff.file for diff in found]
    if not found or len(set(names)) < len(names):
        raise ValueError("a diff names at least one file, and each file once")
    return tuple(found)


def apply_hunks(text: str, hunks: Sequence[Hunk]) -> str:
    """Apply hunks to the text of a file.

    Returns the changed text.

    Raises HunkMismatch if the lines at the position of a hunk are not exactly those that it names.
    """
    lines = split_lines(text)
    result: list[str] = []
    done = 0
    for hunk in hunks:
        first = hunk.start - 1
        for number, expected in enumerate(hunk.before, first):
            found = lines[number] if number < len(lines) else None
            if found != expected:
                raise HunkMismatch(hunk, number + 1, found)
        result += [*lines[done:first], *hunk.after]
        done = first + len(hunk.before)
    return "".join([*result, *lines[done:]])


def _parse_file(lines: Sequence[str], at: int) -> tuple[FileDiff, int]:
    """Read the changes of the file that is named at an index; also return the index after them."""
    file, is_new = _file_name(lines[at : at + 2])
    at += 2
    hunks: list[Hunk] = []
    end = shift = 0  # the last line of the hunk above, and how many lines the hunks above add
    while at < len(lines) and lines[at].startswith("@@"):
        hunk, new_start, at = _parse_hunk(lines, at, is_new)
        expected = hunk.start + shift - (0 if hunk.after else 1)  # no lines: the one before them is named
        if hunk.start <= end or new_start != expected:
            raise ValueError(f"the positions in {hunk.title} contradict those of the hunks above")
        end = hunk.start + len(hunk.before) - 1
        shift += len(hunk.after) - len(hunk.before)
        hunks.append(hunk)
    if not hunks:
        raise ValueError(f"there is no hunk for {file}")
    if is_new and len(hunks) > 1:
        raise ValueError(f"there is more than one hunk for the new file {file}")
    return FileDiff(file, tuple(hunks), is_new), at


def _file_name(lines: Sequence[str]) -> tuple[str, bool]:
    """Return the file that two lines, "--- a/..." and "+++ b/...", name, and whether it is a new one."""
    old, new = (line.rstrip("\n") for line in [*lines, "", ""][:2])
    is_new = old == "--- /dev/null"
    file = new.removeprefix("+++ b/")
    if not new.startswith("+++ b/") or (old != f"--- a/{file}" and not is_new):
        raise ValueError(f'expected "--- a/FILE" and "+++ b/FILE", found {old!r} and {new!r}')
    if not file or file.startswith("/") or ".." in PurePosixPath(file).parts:
        raise ValueError(f"{file!r} is not a path inside the source tree")
    return file, is_new


def _parse_hunk(lines: Sequence[str], at: int, is_new: bool) -> tuple[Hunk, int, int]:
    """Read the hunk at an index; also return its first line in the changed file, and the index after it."""
    match = _HUNK.match(lines[at])
    if match is None:
        raise ValueError(f"{lines[at].rstrip()!r} is not the first line of a hunk")
    title, start, new_start = match[0], int(match[1]), int(match[3])
    counts = int(match[2] or 1), int(match[4] or 1)
    before: list[str] = []
    after: list[str] = []
    while len(before) < counts[0] or len(after) < counts[1]:
        at += 1
        line = lines[at] if at < len(lines) else ""
        if line[:1] not in (" ", "-", "+") or not line.endswith("\n"):
            raise ValueError(f"{title} ends too early, at {line!r}")
        if line[0] != "+":
            before.append(line[1:])
        if line[0] != "-":
            after.append(line[1:])
    if (len(before), len(after)) != counts:
        raise ValueError(f"the counts of lines in {title} are wrong")
    if is_new and (before or start != 0):
        raise ValueError(f"{title} is not that of a new file")
    if not before and not is_new:
        raise ValueError(f"{title} has no line to compare with the file")
    return Hunk(title, 1 if is_new else start, tuple(before), tuple(after)), new_start, at + 1


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
    """Read all patches, in the order in which they are applied.

    Raises HorovodBuildError if this installation of hvdtrain lacks a set, or a patch is malformed.
    """
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
    """Read one patch.

    Raises HorovodBuildError if a field of the header is missing or unknown, or the diff is malformed.
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
    return Patch(
        name=name,
        subject=fields["Subject"],
        needed=fields.get("Needed", ""),
        why=fields["Why"],
        upstream=fields["Upstream"],
        diff=diff,
        files=changes,
    )


def patches_digest(patches: Sequence[Patch]) -> str:
    """Compute twelve hex digits that change if what the patches do to the source changes."""
    return hashlib.sha256("\0".join(patch.diff for patch in patches).encode()).hexdigest()[:12]


def apply_patches(source: Path, patches: Sequence[Patch]) -> None:
    """Apply patches to the source tree, in order.

    Every patch is compared with the source before any file is written. If one does not match, the source
    stays as it is.

    Raises HorovodBuildError if a file is missing, exists although a patch creates it, or differs at the
    position of a hunk.
    """
    texts: dict[str, str] = {}
    for patch in patches:
        for diff in patch.files:
            if diff.is_new:
                _check_absent(source, patch, diff.file, texts)
                texts[diff.file] = ""
            elif diff.file not in texts:
                texts[diff.file] = _read(source, patch, diff.file)
            try:
                texts[diff.file] = apply_hunks(texts[diff.file], diff.hunks)
            except HunkMismatch as error:
                found = "the file ends before it" if error.found is None else f"found {error.found!r}"
                raise HorovodBuildError(
                    f"Patch {patch.name} does not match {diff.file}: hunk {error.hunk.title} differs at line "
                    f"{error.line}; {found}.",
                    _OTHER_SOURCE,
                ) from error
    for file, text in texts.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes(text.encode("utf-8"))


def _check_absent(source: Path, patch: Patch, file: str, texts: Mapping[str, str]) -> None:
    if file in texts or (source / file).exists():
        raise HorovodBuildError(f"Patch {patch.name} creates {file}, which exists already.", _OTHER_SOURCE)


def _read(source: Path, patch: Patch, file: str) -> str:
    # As bytes: line ends must stay as they are.
    try:
        return (source / file).read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise HorovodBuildError(
            f"Patch {patch.name}: Horovod's source has no file {file}.", _OTHER_SOURCE
        ) from error
