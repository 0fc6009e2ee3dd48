"""Unified diffs: read strictly, applied exactly."""

import re

import pytest

from hvdtrain.horovod_build.patching import apply_hunks, parse_diff

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


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("one more\n" + TEXT, 2, "line 1\n"),
        (TEXT.removeprefix("line 1\n"), 2, "line 3\n"),
        (TEXT.replace("line 3\n", "line 3 \n"), 3, "line 3 \n"),
        (TEXT.replace("line 4\n", "Line 4\n"), 4, "Line 4\n"),
        (TEXT.replace("\n", "\r\n"), 2, "line 2\r\n"),
        (TEXT[: TEXT.index("line 11")], 11, ""),
        (TEXT[: TEXT.index("\nline 12")], 11, "line 11"),
    ],
    ids=["moved down", "moved up", "white space", "context", "line ends", "too short", "no last line end"],
)
def test_a_text_that_differs_in_any_way_is_refused(text, line, found):
    title = "@@ -2,3 +2,4 @@" if line < 10 else "@@ -10,2 +11 @@"
    what = f"found {found!r}" if found else "the file ends before it"
    with pytest.raises(ValueError, match=re.escape(f"hunk {title} differs at line {line}; {what}")):
        changed(text)
