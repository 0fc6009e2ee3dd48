"""The edit table, and how the edited launcher ends its workers."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import edit_texts as texts
from hvdtrain.horovod_build.edit_table import EDITS
from hvdtrain.horovod_build.edits import Edit, apply_edits, edits_digest

DOCS = Path(__file__).parents[3] / "docs" / "horovod.md"


def made_up_source(folder: Path) -> Path:
    for edit in EDITS:
        path = folder / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() if path.exists() else "# head\n"
        path.write_text(before + f"# {edit.name}\n" + edit.find * edit.times + "\n")
    return folder


def test_every_edit_applies_to_a_source_that_has_its_text(tmp_path):
    tree = made_up_source(tmp_path)
    apply_edits(tree, EDITS)
    for edit in EDITS:
        text = (tree / edit.file).read_text()
        assert text.count(edit.replacement) >= edit.times, edit.name
        assert edit.find in edit.replacement or edit.find not in text, edit.name


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_a_source_that_differs_stops_the_build_naming_the_edit(tmp_path, edit):
    tree = made_up_source(tmp_path)
    path = tree / edit.file
    path.write_text(path.read_text().replace(edit.find, "something else\n"))
    with pytest.raises(HorovodBuildError, match=re.escape(repr(edit.name))) as error:
        apply_edits(tree, EDITS)
    assert edit.file in error.value.problem


def test_a_text_that_occurs_too_often_stops_the_build(tmp_path):
    (tmp_path / "a.txt").write_text("x x")
    with pytest.raises(HorovodBuildError, match="2 times there, not 1"):
        apply_edits(tmp_path, [Edit("twice", "a.txt", "x", "y", "", "")])


def test_a_missing_file_stops_the_build(tmp_path):
    with pytest.raises(HorovodBuildError, match=r"no file gone\.txt"):
        apply_edits(tmp_path, [Edit("missing", "gone.txt", "x", "y", "", "")])


def test_the_digest_follows_what_is_done_and_not_the_reasons():
    edit = Edit("a", "file", "x", "y", "because", "none found")
    assert edits_digest([edit]) == edits_digest([dataclasses.replace(edit, why="other", upstream="#1")])
    for field in ("file", "find", "replacement"):
        assert edits_digest([edit]) != edits_digest([dataclasses.replace(edit, **{field: "z"})])


def test_the_documented_table_has_the_same_edits():
    section = DOCS.read_text().split("## The edits")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| `(.+?)` \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert rows == [(edit.name, edit.file, edit.why, edit.upstream) for edit in EDITS]


def test_every_edit_says_why_and_names_an_upstream_thread_or_none():
    for edit in EDITS:
        assert edit.why, edit.name
        assert re.search(r"none found|[\w.-]+/[\w.-]+#\d+", edit.upstream), edit.name


def test_the_record_file_is_the_one_that_cmake_reads():
    assert f"/{texts.RECORD_FILE}" in texts.METADATA_NEW


@pytest.mark.parametrize(
    ("extension", "question", "answer"),
    [
        ("tensorflow", "built with MPI", True),
        ("tensorflow", "built with NCCL", False),
        ("torch", "built", True),
        ("tensorflow", "built", False),
        ("torch", "running with GPU", None),
    ],
)
def test_horovodrun_reads_what_was_built(tmp_path, extension, question, answer):
    metadata = {"pytorch": "2.13.0", "have_mpi": True, "have_gloo": True, "have_nccl": False}
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    names: dict = {"__file__": str(tmp_path / "common" / "util.py")}
    exec("import json, os\n" + texts.RECORDED, names)
    assert names["_recorded"](extension, question) is answer
    (tmp_path / "metadata.json").unlink()
    assert names["_recorded"](extension, question) is None


# What stands between the edited parts of safe_shell_exec.terminate_executor_shell_and_children.
BEFORE_TERMINATE = """\
def terminate_executor_shell_and_children(pid):
    try:
        p = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return

"""
BETWEEN = """
    for child in alive:
        try:
            for grandchild in child.children(recursive=True):
                try:
                    grandchild.kill()
                except psutil.NoSuchProcess:
                    pass
            child.kill()
        except psutil.NoSuchProcess:
            pass

"""
SAVES = """
import signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""
IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


def terminate(pid: int, grace_seconds: float) -> None:
    """Runs the launcher's function as the edits leave it."""
    text = texts.GRACE_OLD + BEFORE_TERMINATE + texts.TERMINATE_OLD + BETWEEN + texts.KILL_OLD
    for edit in EDITS:
        if edit.file.endswith("safe_shell_exec.py"):
            assert text.count(edit.find) == 1
            text = text.replace(edit.find, edit.replacement)
    names: dict = {}
    exec("import os, signal, time, psutil\n" + text, names)
    names["GRACEFUL_TERMINATION_TIME_S"] = grace_seconds
    names["terminate_executor_shell_and_children"](pid)


@pytest.fixture
def worker(tmp_path):
    """Starts a worker as the launcher does, under /bin/sh, and ends it after the test."""
    started = []

    def start(script: str, shell: str) -> subprocess.Popen:
        path = tmp_path / "worker.py"
        path.write_text(script)
        command = shell.format(command=f"{sys.executable} {path}")
        process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        for left in (*psutil.Process().children(recursive=True),):
            left.kill()
        process.wait()
        process.stdout.close()


# `: ; command` keeps the shell there in every shell; `exec` replaces it, as bash does unasked.
SHELLS = pytest.mark.parametrize("shell", ["{command}; exit $?", "exec {command}"], ids=["stays", "replaced"])


@SHELLS
def test_a_worker_gets_sigterm_and_its_exit_code_is_kept(worker, shell):
    process = worker(SAVES, shell)
    terminate(process.pid, grace_seconds=30)
    assert process.stdout.readline() == "saved\n"
    assert process.wait(timeout=30) == 75


@SHELLS
def test_a_worker_that_ignores_sigterm_is_killed_when_the_grace_is_over(worker, shell):
    process = worker(IGNORES, shell)
    children = psutil.Process(process.pid).children()
    terminate(process.pid, grace_seconds=0.2)
    assert process.wait(timeout=30) == -signal.SIGKILL
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_the_grace_time_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("HOROVOD_GRACEFUL_TERMINATION_SECONDS", "2.5")
    names: dict = {}
    exec("import os, time\n" + texts.GRACE_NEW, names)
    assert names["GRACEFUL_TERMINATION_TIME_S"] == 2.5
