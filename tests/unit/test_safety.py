"""Files from elsewhere are data, and control no terminal; files of a run have the umask's permissions."""

import stat
import subprocess
import sys

import pytest

from hvdtrain.host import launcher
from hvdtrain.storage.text import printable


def test_a_run_has_the_permissions_of_the_umask(tmp_path):
    command = [sys.executable, "-m", "hvdtrain", "--framework", "torch", "--steps", "2", "--run-dir", "run"]
    options = {"capture_output": True, "text": True, "timeout": 300, "umask": 0o027}
    done = subprocess.run(command, check=False, cwd=tmp_path, **options)
    assert done.returncode == 0, done.stderr
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert any(path.name == "model.safetensors" for path in paths)
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


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
