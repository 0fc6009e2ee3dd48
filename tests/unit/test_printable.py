"""Words of somebody else's files do not control the terminal."""

import sys

import pytest

from hvdtrain.host import launcher
from hvdtrain.storage.text import printable

TITLE = "\x1b]0;title\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain: 3 €", "plain: 3 €"),
        ("of Windows\r\n", "of Windows\n"),
        ("\x1b[1m\x1b[31mred\x1b[0m", "red"),
        (f"{TITLE}task", "?]0;title?task"),
        ("\x9b2J", "?2J"),
        ("\u202egnp.exe", "?gnp.exe"),
        ("half \ud800", "half ?"),
    ],
)
def test_what_controls_the_terminal_is_shown_as_a_question_mark(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize("rank", [None, "0"])
def test_what_a_console_prints_does_not_control_the_terminal(capsys, monkeypatch, rank):
    for name in launcher._LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if rank:
        monkeypatch.setenv("HOROVOD_RANK", rank)
    console = launcher.open_console()
    console.file = sys.stdout
    console.print(f"note: {TITLE}", highlight=False, markup=False, style="yellow")
    assert capsys.readouterr().out == "note: ?]0;title?\n"
