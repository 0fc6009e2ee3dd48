"""Reading unified diffs and applying them exactly: at the stated line, or not at all.

There is no fuzz and no search for another position. See docs/design/0017-horovod-patches-are-diffs.md.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")

# Lines that git writes between the files of a diff, and that say nothing about its effect.
_IGNORED = ("diff --git ", "index ", "new file mode ")


class HunkMismatch(Exception):
    """A hunk does not match the file that it is applied to.

    Args:
        hunk: the hunk.
        line: number of the first line that differs, from 1.
        found: that line; None if the file ends before it.
    """

    def __init__(self, hunk: "Hunk", line: int, found: str | None) -> None:
        super().__init__(f"{hunk.title} does not match line {line}")
        self.hunk = hunk
        self.line = line
        self.found = found


@dataclass(frozen=True)
class Hunk:
    """One changed place of a file.

    Args:
        title: its position as in the diff, e.g. "@@ -18,3 +18,3 @@".
        start: number of its first line in the unchanged file, from 1.
        before: the lines there, each with its line end.
        after: the lines that replace them.
    """

    title: str
    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class FileDiff:
    """The changes of one file.

    Args:
        file: its path below the root of the source tree.
        hunks: in the order of their lines.
        is_new: whether the file is created; there is one hunk then, and nothing before it.
    """

    file: str
    hunks: tuple[Hunk, ...]
    is_new: bool = False


def split_lines(text: str) -> list[str]:
    """Split a text at line feeds, and only there, into lines that keep their ends."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def parse_diff(text: str) -> tuple[FileDiff, ...]:
    """Read a unified diff that changes or creates files.

    Args:
        text: the output of ``git diff`` or ``diff -u``, with the prefixes a/ and b/, and /dev/null for a
            file that does not exist yet.

    Returns:
        One entry for each file.

    Raises:
        ValueError: If the text is anything else, if a hunk of a file has no line to compare with it,
            or if positions or counts of lines contradict one another.
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

    Args:
        text: the whole file.
        hunks: in the order of their lines, as `parse_diff` returns them.

    Returns:
        The changed text.

    Raises:
        HunkMismatch: If the lines at the position of a hunk are not exactly those that it names.
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
