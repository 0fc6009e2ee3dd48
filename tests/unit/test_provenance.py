"""Where a run came from: config.yaml repeats it from any folder, and a changed task is seen."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import yaml
from support import numpy_backend

from hvdtrain.config import Config
from hvdtrain.config.layers import read_file, resolve
from hvdtrain.jobs.run_directory.provenance import Provenance, config_text, git_state, keep, provenance_of
from hvdtrain.jobs.train import run_job

SECONDS = 60.0  # more than git takes on a busy machine
TASK = "from support.numpy_backend import NumpyDigits as Mine\n"


def config(**fields: object) -> Config:
    return Config(framework="torch", epochs=1, **fields)


def test_the_commit_is_read_and_the_file_system_monitor_of_a_repository_is_not_executed(tmp_path):
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file.py").write_text("1\n")
    git("add", "file.py")
    git("commit", "-q", "-m", "one")
    assert git_state(tmp_path, SECONDS) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "file.py").write_text("2\n")
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    hook.chmod(0o755)
    git("config", "core.fsmonitor", str(hook))
    (tmp_path / "executed").unlink(missing_ok=True)  # by git config itself
    assert git_state(tmp_path, SECONDS)[1]
    assert not (tmp_path / "executed").exists()


def came_from(command=("python", "-m", "hvdtrain"), file: str = "", source: bytes = b"") -> Provenance:
    task = {"path": file, "sha256": hashlib.sha256(source).hexdigest()} if file else None
    record = {"command": list(command), "folder": "/work", "workers": 3, "hosts": ["one", "two"]}
    record |= {"commit": "abc", "dirty": True, "task_file": task, "versions": {"Python": "3.11"}}
    return Provenance(record, ["one", "two", "one"], source)


@pytest.mark.parametrize("end", ["\n", "\u2028", "\0", "\udc80"])
def test_a_command_cannot_add_fields(tmp_path, end):
    command = ["python", f"x{end}seed: 99{end}"]
    text = config_text(config(seed=3), tmp_path, came_from(command=command))
    (tmp_path / "config.yaml").write_text(text)
    assert resolve([read_file(tmp_path / "config.yaml")]) == config(seed=3)


def test_paths_in_the_file_mean_the_same_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    fields = {"task": "images", "init": "runs/a", "task_options": {"path": "images", "model": "images"}}
    found = yaml.safe_load(config_text(config(**fields), tmp_path))
    assert found["init"] == f"{tmp_path}/runs/a"
    assert found["task_options"] == {"path": f"{tmp_path}/images", "model": "images"}
    own = yaml.safe_load(config_text(config(task="a/x.py:Mine", task_options={"path": "images"}), tmp_path))
    assert (own["task"], own["task_options"]) == (f"{tmp_path}/a/x.py:Mine", {"path": "images"})


def test_starts_are_kept_and_a_changed_task_is_said(tmp_path):
    first = came_from(file="/a/x.py", source=b"one")
    assert keep(first, tmp_path, 0, None) == []
    assert (tmp_path / "task" / "x.py").read_bytes() == b"one"
    assert keep(first, tmp_path, 5, tmp_path) == []
    changed = came_from(file="/b/x.py", source=b"two")
    (note,) = keep(changed, tmp_path, 9, tmp_path)
    assert "/b/x.py has changed since the run's start at step 5" in note
    two = f"x-{hashlib.sha256(b'two').hexdigest()[:8]}.py"
    assert (tmp_path / "task" / two).read_bytes() == b"two"
    starts = [json.loads(line) for line in (tmp_path / "provenance.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 5, 9]
    assert starts[-1]["task_file"]["copy"] == f"task/{two}"
    assert (starts[0]["commit"], starts[0]["dirty"], starts[0]["workers"]) == ("abc", True, 3)
    (again,) = keep(came_from(file="/b/x.py", source=b"three"), tmp_path, 9, tmp_path)
    assert again.endswith(f"{tmp_path}/task/{two} is what it was")
    assert (tmp_path / "task" / two).read_bytes() == b"two"


def test_config_yaml_repeats_a_run_from_another_folder(train, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(TASK)
    monkeypatch.syspath_prepend(Path(numpy_backend.__file__).parents[1])
    train(None, task="mine.py:Mine", steps=3, seed=3)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    repeated = run_job([read_file(tmp_path / "run" / "config.yaml")])
    first = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert repeated.final == first["final"]
    assert (tmp_path / "run" / "task" / "mine.py").read_text() == TASK


def test_a_removed_working_folder_ends_no_job(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    fields = config(task="x.py:Mine", init="runs/a")
    found = provenance_of(fields, ["here"], {}, is_instance=False)
    assert [found.record[key] for key in ("folder", "task_file", "commit", "dirty")] == ["", None, None, None]
    assert yaml.safe_load(config_text(fields, tmp_path, found)) == yaml.safe_load(fields.to_yaml())
