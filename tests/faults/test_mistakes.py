"""A user's mistakes: one message that says what is wrong, no traceback, the right exit code."""

import socket
import sys

import pytest
from endings import SOON_WITH_IMPORT_SECONDS, TASKS, Ending, end_of
from support import cases, pool
from support.jobs import Result, run

SOUND = ("--framework", "torch", "--task", f"{TASKS}:Sound")

# name: (files to write first, options, exit code, what the message must hold).
# These end before a framework loads: the command line runs in the process of the tests.
EARLY = {
    "value out of range": (
        {},
        (*SOUND, "--momentum", "1.5"),
        2,
        ["momentum: should be less than 1, found 1.5 (options)"],
    ),
    "unknown key": (
        {"job.yaml": "lerning_rate: 0.1\n"},
        ("job.yaml", *SOUND),
        2,
        ["job.yaml: there is no field 'lerning_rate'", "Did you mean 'learning_rate'?"],
    ),
    "unknown task": (
        {},
        ("--framework", "torch", "--task", "digit"),
        2,
        ["no built-in task 'digit'", "Did you mean 'digits'?"],
    ),
    "task file that does not import": (
        {"mine.py": "import numpy\nimport no_such_module\n"},
        ("--framework", "torch", "--task", "mine.py:Mine"),
        2,
        ["task file mine.py cannot be imported", "mine.py, line 2", "No module named 'no_such_module'"],
    ),
}
# These end later: in a pool, or in a process of its own if TensorFlow must not have been used before.
LATE = {
    "TensorFlow used too early": (
        {"mine.py": "import tensorflow as tf\nZERO = tf.zeros(1)\n\nclass Mine: pass\n"},
        ("--framework", "tf", "--task", "mine.py:Mine"),
        3,
        [
            "TensorFlow was used before hvdtrain could choose its device and threads",
            "inside the task's methods",
        ],
    ),
    "empty data": (
        {},
        ("--framework", "torch", "--task", f"{TASKS}:Empty"),
        2,
        ["the training data is empty (0 samples)"],
    ),
    "too small a batch": (
        {},
        (*SOUND, "--global-batch-size", "1", "--accumulate", "2"),
        2,
        ["global_batch_size 1 is smaller than workers x accumulate = 1 x 2"],
    ),
    "run directory below a file": (
        {"occupied": ""},
        (*SOUND, "--run-dir", "occupied/run"),
        3,
        ["cannot make the run directory", "occupied/run"],
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


def check(result: Result, code: int, said: list[str], folder) -> None:
    """Check that a mistake is explained once, within a screen, and that nothing is written."""
    assert result.returncode == code, result.output
    for words in said:
        assert result.stderr.count(words) == 1, result.output
    assert "Traceback" not in result.output
    assert len(result.stderr.splitlines()) <= 6
    assert not (folder / "runs").exists()


def write(files: dict[str, str], folder) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize("mistake", EARLY)
def test_a_mistake_is_explained_once(mistake, tmp_path, hvdtrain_here):
    files, options, code, said = EARLY[mistake]
    write(files, tmp_path)
    check(hvdtrain_here(*options), code, said, tmp_path)


@pytest.mark.parametrize("mistake", LATE)
def test_a_mistake_that_shows_later_is_explained_once(mistake, tmp_path):
    files, options, code, said = LATE[mistake]
    write(files, tmp_path)
    if "tf" in options:
        result = run(["python", "-m", "hvdtrain", *options], tmp_path)
    else:
        result = pool.command(1, "none", "torch", *options, cwd=tmp_path)
    check(result, code, said, tmp_path)


def test_debug_shows_the_traceback(hvdtrain_here):
    result = hvdtrain_here("--debug", *SOUND, "--momentum", "1.5")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "momentum: should be less than 1" in result.stderr


def check_job(ending: Ending, said: str) -> None:
    assert ending.returncode == 2
    assert ending.output.count(said) == 1, ending.output
    assert ending.output.count("hvdtrain: ") == 1
    assert "Traceback" not in ending.output


def test_a_run_that_is_there_is_left_as_it_was(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    ending = end_of(2, "gloo", "Sound", "--framework", "torch", cwd=tmp_path)
    check_job(ending, "run_dir: run already holds a run (summary.json)")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["summary.json"]
    assert (tmp_path / "run" / "summary.json").read_text() == "{}"


def test_a_mistake_that_one_worker_finds_ends_all_soon(tmp_path):
    ending = end_of(2, "gloo", "BrokenModel", "--framework", "torch", cwd=tmp_path)
    check_job(ending, "ValueError: no weights to start from")
    assert f"hvdtrain: rank 1 on {socket.gethostname()}: " in ending.output
    assert ending.seconds_since_failure() < SOON_WITH_IMPORT_SECONDS
