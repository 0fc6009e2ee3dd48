"""Where a run came from: the comments in config.yaml, provenance.jsonl, and a copy of the task's file."""

import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config import Config
from hvdtrain.host.processes import run_limited
from hvdtrain.reporting.jsonl import AppendFile, lines_of, to_json, write_parts
from hvdtrain.reporting.report import PROVENANCE_FILE
from hvdtrain.storage.files import check_link, parse_line, read_regular
from hvdtrain.storage.urls import is_url

LIMIT_SECONDS = 2.0
# of a hook that runs git; they would name another repository than the folder's
_OF_ANOTHER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY")
_MAX_BYTES = 10_000_000  # of a task's file
_INSTALLED = ("site-packages", "dist-packages")
TASK_FOLDER = "task"
PATH_OPTIONS = ("path", "eval_path")  # of the built-in tasks
_STATES = {True: ", with changes", False: "", None: ", perhaps with changes"}


def git_state(folder: Path, limit_seconds: float = LIMIT_SECONDS) -> tuple[str, bool | None]:
    """Return the commit of a folder, or nothing, and whether its files were changed, or None if not known.

    The repository's file-system monitor is not executed; its content filters (``filter.*.clean``) are, for
    files that may have changed, as by every ``git status``.
    """
    until = time.monotonic() + limit_seconds
    environ = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER}

    def git(*words: str) -> str | None:
        command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "-C", str(folder), *words]
        try:
            done = run_limited(command, max(0.0, until - time.monotonic()), environ)
        except OSError:
            return None
        return done.output.strip() if done.code == 0 else None

    if not (commit := git("rev-parse", "--verify", "HEAD")):
        return "", None
    changes = git("status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


@dataclass(frozen=True)
class Provenance:
    """Where a start of a run came from."""

    # what provenance.jsonl has of it: the command and its folder, workers and hosts, the commit of the folder
    # of the task's file, or of the working folder for a built-in task, and that file if there is one
    record: Mapping[str, Any]
    hosts: Sequence[str]  # the host of each worker
    source: bytes = b""  # what the task's file holds
    missing: str = ""  # why config.yaml does not repeat the run; empty if it does

    @property
    def task_file(self) -> Mapping[str, Any]:
        """Path and SHA-256 of the task's file; empty if the task is built in, or has none."""
        return self.record["task_file"] or {}


def provenance_of(
    config: Config, hosts: Sequence[str], versions: Mapping[str, str], is_instance: bool
) -> Provenance:
    """Find out where this start of a run comes from. Local: no collective; git has two seconds."""
    file: Path | None = None
    source, folder = b"", ""
    with suppress(OSError):  # without a working folder, or a file that cannot be read
        folder = os.getcwd()
        if (found := task_file(config.task)) is not None:
            source, file = read_regular(found, _MAX_BYTES), found
    missing = ""
    if is_instance:
        missing = "the task was passed as an instance, and its constructor's arguments are not known"
    elif "<locals>" in config.task or config.task.startswith("__main__:"):
        missing = f"the task {config.task} is in no file that it can be loaded from"
    commit, is_dirty = git_state(Path(folder) if file is None else file.parent)
    record = {
        "command": list(sys.orig_argv),
        "folder": folder,
        "workers": len(hosts),
        "hosts": sorted(set(hosts)),
        "commit": commit or None,
        "dirty": is_dirty,
        "task_file": file and {"path": str(file), "sha256": hashlib.sha256(source).hexdigest()},
        "versions": {"Python": platform.python_version(), **versions, "numpy": np.__version__},
    }
    return Provenance(record, list(hosts), source, missing)


def task_file(spec: str) -> Path | None:
    """Return the file that a task was loaded from; None if it is built in, or has none."""
    place, colon, _ = spec.rpartition(":")
    if not colon:
        return None
    if place.endswith(".py"):
        return Path(os.path.abspath(place))
    found = getattr(sys.modules.get(place), "__file__", None)
    return Path(os.path.abspath(found)) if found and place != "__main__" else None


def config_text(config: Config, run_dir: Path, provenance: Provenance | None = None) -> str:
    """Return what config.yaml holds: fields that mean the same in any folder, below where they came from."""
    fields: dict[str, Any] = {}
    with suppress(OSError):  # without a working folder
        fields = _absolute(config)
    text = config.to_yaml(fields)
    if provenance is None:
        return text
    path = str(run_dir / "config.yaml")
    with suppress(OSError):
        path = os.path.abspath(path)
    own, task = provenance.record, provenance.task_file
    slots, workers = Counter(provenance.hosts), len(provenance.hosts)  # as many workers on the same hosts
    where = ["-H", ",".join(f"{host}:{count}" for host, count in slots.items())] if len(slots) > 1 else []
    launcher = ["horovodrun", "-np", str(workers), *where] if workers > 1 else []
    again = shlex.join([*launcher, "python", "-m", "hvdtrain", path])
    lines = [
        f"this file does not repeat the run: {provenance.missing}"
        if provenance.missing
        else f"to repeat this run: {again}",
        f"command: {shlex.join(own['command'])}",
        f"folder: {own['folder']}",
        f"workers: {own['workers']} on {', '.join(own['hosts'])}",
        f"commit: {own['commit'] + _STATES[own['dirty']] if own['commit'] else 'none'}",
        f"task file: {task['path']} (sha256 {task['sha256']})" if task else "task file: none",
        f"versions: {', '.join(f'{name} {version}' for name, version in own['versions'].items())}",
    ]
    # what would end a line, or cannot be written, is escaped
    return "".join(f"# {one if one.isprintable() else json.dumps(one)}\n" for one in lines) + text


def keep(provenance: Provenance, run_dir: Path, step: int, source_dir: Path | None) -> list[str]:
    """Write a start to provenance.jsonl, keep a copy of the task's file; return what to report."""
    notes, copy, task = list[str](), "", provenance.task_file
    before: dict[str, Any] = {}
    with suppress(OSError):
        lines = lines_of(source_dir / PROVENANCE_FILE) if source_dir is not None else ()
        before = next(reversed([*filter(None, map(parse_line, lines))]), {})
    old = before.get("task_file")
    old = old if isinstance(old, dict) else {}
    if task and old.get("sha256", task["sha256"]) != task["sha256"]:
        kept = f"; {source_dir}/{old['copy']} is what it was" if old.get("copy") else ""
        since = f"has changed since the run's start at step {before.get('step')}"
        notes.append(f"the task's file {task['path']} {since}{kept}")
    try:
        copy = _copy(provenance, run_dir) if task else ""
    except OSError as error:
        notes.append(f"cannot keep a copy of the task's file: {error.strerror or error}")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"time": now, "step": step, **provenance.record}
    record["task_file"] = {**task, "copy": copy or None} if task else None
    try:
        file = AppendFile(run_dir / PROVENANCE_FILE)
        problem = file.append((to_json(record) + "\n").encode())
        file.close()
    except OSError as error:
        problem = error
    if problem is not None:
        notes.append(f"cannot write {run_dir / PROVENANCE_FILE}: {problem.strerror or problem}")
    return notes


def _copy(provenance: Provenance, run_dir: Path) -> str:
    """Keep a copy of the task's file next to those of before; return its path."""
    folder, file = run_dir / TASK_FOLDER, Path(provenance.task_file["path"])
    check_link(folder, run_dir)
    folder.mkdir(exist_ok=True)
    path = folder / file.name
    if path.exists() and read_regular(path, _MAX_BYTES) != provenance.source:
        path = folder / f"{file.stem}-{provenance.task_file['sha256'][:8]}{file.suffix}"
    write_parts(path, [provenance.source])
    return f"{TASK_FOLDER}/{path.name}"


def _absolute(config: Config) -> dict[str, Any]:
    """Return the fields with relative paths as they are written: so that they mean the same in any folder."""
    fields: dict[str, Any] = {}
    place, colon, name = config.task.rpartition(":")
    file = task_file(config.task)
    is_own_module = file is not None and file.suffix == ".py" and not set(_INSTALLED) & set(file.parts)
    is_package = file is not None and file.name == "__init__.py"  # which is imported by its name alone
    if colon and (place.endswith(".py") or (is_own_module and not is_package and "." not in place)):
        fields["task"] = f"{file}:{name}"
    if config.init is not None:
        fields["init"] = config.init if is_url(config.init) else os.path.abspath(config.init)
    if not colon:
        options = {
            key: os.path.abspath(value)
            for key, value in config.task_options.items()
            if key in PATH_OPTIONS and isinstance(value, str) and os.path.exists(value)
        }
        if options:
            fields["task_options"] = {**config.task_options, **options}
    return fields
