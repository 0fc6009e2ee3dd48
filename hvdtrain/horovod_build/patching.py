"""The patches for Horovod's source: reading them, applying them, telling one version from another.

They are files of this package, in two sets. The build set is what Horovod needs to compile and to
start on current frameworks; the launcher set changes horovodrun. Each file is a unified diff below
a header, and applies to the source as the files before it leave it.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.resources import files
from pathlib import Path

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build.unified_diff import FileDiff, HunkMismatch, apply_hunks, parse_diff

# Folders below patches/, in the order in which they are applied.
SETS = ("build", "launcher")

_OTHER_SOURCE = "This is not the source of Horovod that the patches were made for."


@dataclass(frozen=True)
class Patch:
    """One patch for Horovod's source.

    Args:
        name: the set and the file without its ending, e.g. "build/0001-cxx17".
        subject: what it does.
        needed: of the build set, when Horovod does not compile or start without it: "always",
            "with Open MPI 5", "no"; empty in the launcher set.
        why: what goes wrong without it.
        upstream: issues or pull requests about the same thing, or "none found".
        diff: the unified diff, without the header.
        files: the diff, parsed.
    """

    name: str
    subject: str
    needed: str
    why: str
    upstream: str
    diff: str
    files: tuple[FileDiff, ...]


@functools.cache
def horovod_patches() -> tuple[Patch, ...]:
    """Read all patches, in the order in which they are applied.

    Raises:
        HorovodBuildError: If this installation of hvdtrain lacks a set, or a patch is malformed.
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

    Args:
        name: the set and the file without its ending.
        text: the whole file: a header of the form "Name: value", in which lines that begin with
            a space continue the one above, an empty line, and a unified diff.

    Raises:
        HorovodBuildError: If a field of the header is missing or unknown, or the diff is malformed.
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

    Every patch is compared with the source before any file is written. If one does not match, the
    source stays as it is.

    Args:
        source: the unpacked source distribution.
        patches: in the order in which they apply.

    Raises:
        HorovodBuildError: If a file is missing, exists although a patch creates it, or differs at the
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
