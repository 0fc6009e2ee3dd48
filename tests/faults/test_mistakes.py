"""A user's mistakes: one message that says what is wrong, no traceback, the right exit code."""

import sys

import pytest
from endings import TASKS, end_of
from support import cases, pool
from support.jobs import Result, run

SOUND = ("--framework", "torch", "--task", f"{TASKS}:Sound")
MOMENTUM = "momentum: should be less than 1, found 1.5 (options)"

# name: (a file to write first, options, exit code, what the message must hold)
MISTAKES = {
    "value out of range": ("", (*SOUND, "--momentum", "1.5"), 2, [MOMENTUM]),
    "task file that does not import": (
        "import numpy\nimport no_such_module\n",
        ("--framework", "torch", "--task", "mine.py:Mine"),
        2,
        ["task file mine.py cannot be imported", "mine.py, line 2", "No module named 'no_such_module'"],
    ),
    "TensorFlow used too early": (  # in a process of its own, in which it was not used before
        "import tensorflow as tf\nZERO = tf.zeros(1)\n\nclass Mine: pass\n",
        ("--framework", "tf", "--task", "mine.py:Mine"),
        3,
        ["TensorFlow was used before hvdtrain could choose its device and threads", "the task's methods"],
    ),
    "too small a batch": (  # which shows when the workers are known
        "",
        (*SOUND, "--global-batch-size", "1", "--accumulate", "2"),
        2,
        ["global_batch_size 1 is smaller than workers x accumulate = 1 x 2"],
    ),
}


@pytest.fixture
def hvdtrain_here(tmp_path, monkeypatch, capfd):
    """Run hvdtrain in this process and in the test's folder; what it imported is forgotten afterwards."""
    modules = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run_here(*words: str) -> Result:
        capfd.readouterr()
        code = cases.command_line(list(words))
        return Result(code, *capfd.readouterr())

    yield run_here
    for name in set(sys.modules) - modules:
        if name.startswith("hvdtrain_task_"):
            del sys.modules[name]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained_once_within_a_screen_and_nothing_is_written(mistake, tmp_path, hvdtrain_here):
    text, options, code, said = MISTAKES[mistake]
    (tmp_path / "mine.py").write_text(text)
    if "tf" in options:
        result = run(["python", "-m", "hvdtrain", *options], tmp_path)
    elif "--global-batch-size" in options:
        result = pool.command(1, "none", "torch", *options, cwd=tmp_path)
    else:
        result = hvdtrain_here(*options)
    assert result.returncode == code, result.output
    for words in said:
        assert result.stderr.count(words) == 1, result.output
    assert "Traceback" not in result.output
    assert len(result.stderr.splitlines()) <= 6
    assert not (tmp_path / "runs").exists()


def test_debug_shows_the_traceback(hvdtrain_here):
    result = hvdtrain_here("--debug", *SOUND, "--momentum", "1.5")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert MOMENTUM in result.stderr


def test_a_run_that_is_there_is_left_as_it_was(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    ending = end_of(2, "gloo", "Sound", "--framework", "torch", cwd=tmp_path)
    assert ending.returncode == 2
    assert ending.output.count("run_dir: run already holds a run (summary.json)") == 1, ending.output
    assert ending.output.count("hvdtrain: ") == 1
    assert "Traceback" not in ending.output
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]
    assert (tmp_path / "run" / "summary.json").read_text() == "{}"
