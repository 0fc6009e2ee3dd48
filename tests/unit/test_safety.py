"""Files from elsewhere are data, and control no terminal; files of a run have the umask's permissions."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.host import launcher
from hvdtrain.storage.text import printable


def hvdtrain(folder, *words, **options):
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    options |= {"cwd": folder, "env": environ, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(["python", "-m", "hvdtrain", *words], check=False, **options)


def test_a_run_has_the_permissions_of_the_umask(tmp_path):
    done = hvdtrain(tmp_path, "--framework", "torch", "--steps", "2", "--run-dir", "run", umask=0o027)
    assert done.returncode == 0, done.stderr
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert any(path.name == "model.safetensors" for path in paths)
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


def test_weights_that_need_code_to_be_loaded_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    trace = tmp_path / "was-here"

    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {trace}",)

    torch.save({"weight": Attack()}, tmp_path / "weights.pt")
    done = hvdtrain(tmp_path, "import", "weights.pt", "--output", "out")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not trace.exists()


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
