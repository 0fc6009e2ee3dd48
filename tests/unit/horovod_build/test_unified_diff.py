"""Unified diffs: read strictly, applied exactly."""

import difflib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdtrain.horovod_build.patching import HunkMismatch, apply_hunks, parse_diff

TEXT = "".join(f"line {number}\n" for number in range(1, 13))
DIFF = """\
--- a/folder/file
+++ b/folder/file
@@ -2,3 +2,4 @@ a heading
 line 2
-line 3
+line three
+line three and a half
 line 4
@@ -10,2 +11 @@
-line 10
 line 11
"""
NEW = "--- /dev/null\n+++ b/folder/new\n@@ -0,0 +1,2 @@\n+one\n+two\n"


def changed(text: str) -> str:
    return apply_hunks(text, parse_diff(DIFF)[0].hunks)


def test_a_diff_is_applied_at_its_lines():
    expected = TEXT.replace("line 3\n", "line three\nline three and a half\n").replace("line 10\n", "")
    assert changed(TEXT) == expected
    assert parse_diff(DIFF)[0].file == "folder/file"


def test_a_new_file_has_the_lines_of_its_diff():
    (diff,) = parse_diff(NEW)
    assert (diff.file, diff.is_new) == ("folder/new", True)
    assert apply_hunks("", diff.hunks) == "one\ntwo\n"


def test_what_git_writes_between_files_is_ignored():
    git = "diff --git a/folder/file b/folder/file\nindex 0123456..789abcd 100644\n"
    assert parse_diff(git + DIFF) == parse_diff(DIFF)


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("one more\n" + TEXT, 2, "line 1\n"),
        (TEXT.removeprefix("line 1\n"), 2, "line 3\n"),
        (TEXT.replace("line 3\n", "line 3 \n"), 3, "line 3 \n"),
        (TEXT.replace("line 4\n", "Line 4\n"), 4, "Line 4\n"),
        (TEXT.replace("\n", "\r\n"), 2, "line 2\r\n"),
        (TEXT[: TEXT.index("line 11")], 11, None),
        (TEXT[: TEXT.index("\nline 12")], 11, "line 11"),
    ],
    ids=["moved down", "moved up", "white space", "context", "line ends", "too short", "no last line end"],
)
def test_a_text_that_differs_in_any_way_is_refused(text, line, found):
    with pytest.raises(HunkMismatch) as error:
        changed(text)
    assert (error.value.line, error.value.found) == (line, found)
    assert error.value.hunk.title == ("@@ -2,3 +2,4 @@" if line < 10 else "@@ -10,2 +11 @@")


BAD = {
    "nothing": ("", "names at least one file"),
    "text in front": ("words\n" + DIFF, 'expected "--- a/FILE"'),
    "text behind": (DIFF + "words\n", 'expected "--- a/FILE"'),
    "two names": (DIFF.replace("+++ b/folder/file", "+++ b/other"), 'expected "--- a/FILE"'),
    "a new file that has lines": (
        DIFF.replace("--- a/folder/file", "--- /dev/null"),
        "not that of a new file",
    ),
    "a new file without a name": (NEW.replace("+++ b/folder/new", "+++ folder/new"), 'expected "--- a/FILE"'),
    "a new file in two hunks": (NEW + NEW.partition("folder/new\n")[2], "contradict"),
    "a path that leaves the tree": (DIFF.replace("folder/", "folder/../../"), "not a path inside"),
    "an absolute path": (DIFF.replace("folder/", "/"), "not a path inside"),
    "a file twice": (DIFF + DIFF, "each file once"),
    "no hunk": ("--- a/file\n+++ b/file\n", "no hunk"),
    "no numbers": (DIFF.replace("-2,3", "-a,3"), "not the first line of a hunk"),
    "too few lines": (DIFF.removesuffix(" line 11\n"), "ends too early"),
    "a bare empty line": (DIFF.replace(" line 4\n", "\n"), "ends too early"),
    "too many lines": (DIFF.replace("-2,3", "-2,1"), "counts of lines"),
    "no line to compare": ("--- a/file\n+++ b/file\n@@ -2,0 +3 @@\n+line\n", "no line to compare"),
    "a shift that is wrong": (DIFF.replace("+11 @@", "+10 @@"), "contradict"),
    "hunks that overlap": (DIFF.replace("-10,2 +11", "-4,2 +5"), "contradict"),
    "no last line end": (DIFF.removesuffix("\n"), "ends too early"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_diff_is_refused(name):
    diff, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        parse_diff(diff)


def test_a_removed_line_needs_no_context():
    (parsed,) = parse_diff("--- a/file\n+++ b/file\n@@ -2 +1,0 @@\n-line 2\n")
    assert apply_hunks(TEXT, parsed.hunks) == TEXT.replace("line 2\n", "")


# Few different lines, so that hunks could be taken for one another; some end lines for str.splitlines alone.
LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "a\x0cb\n", "b\r\n"]), min_size=1, max_size=12)


@given(LINES, LINES, st.integers(1, 3))
def test_what_difflib_writes_is_applied(before, after, context):
    diff = "".join(difflib.unified_diff(before, after, "a/file", "b/file", n=context))
    assume(diff)  # equal texts have none
    (parsed,) = parse_diff(diff)
    assert apply_hunks("".join(before), parsed.hunks) == "".join(after)
