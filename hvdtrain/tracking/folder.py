"""The folder ``tracking/`` of a run directory: the run's name among trackers, and when its jobs started."""

import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.regular_files import check_link, read_regular
from hvdtrain.reporting.jsonl import AppendFile, lines_of, parse_line, to_json, write_json

FOLDER = "tracking"
ID_FILE, STARTS_FILE = "id.json", "starts.jsonl"
_ID = re.compile(r"[0-9a-z]{8,64}")
_ADDRESS = re.compile(r"(?<=://)\S+")
_MAX_BYTES = 4096


def tracking_folder(run_dir: Path) -> Path:
    """Return the folder, which is made if need be.

    Raises:
        OSError: If it cannot be made, or leads out of the run directory.
    """
    folder = run_dir / FOLDER
    check_link(folder, run_dir)
    folder.mkdir(exist_ok=True)
    return folder


def new_id() -> str:
    """Return a name that no other run has."""
    return uuid.uuid4().hex


def read_id(run_dir: Path) -> str | None:
    """Return the name that trackers know a run by; None if it has none, or none that can be read."""
    try:
        found = json.loads(read_regular(run_dir / FOLDER / ID_FILE, _MAX_BYTES))
        tracking_id = found["id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return tracking_id if isinstance(tracking_id, str) and _ID.fullmatch(tracking_id) else None


def write_id(run_dir: Path, tracking_id: str) -> None:
    """Keep the name of a run in its directory; what is there of a run with another name is set aside.

    Raises:
        OSError: If it cannot be written.
    """
    before = read_id(run_dir)
    if before is not None and before != tracking_id:
        (run_dir / FOLDER).rename(run_dir / f"{FOLDER}-of-{before}")
    if before != tracking_id:
        write_json(tracking_folder(run_dir) / ID_FILE, {"id": tracking_id})


def add_start(run_dir: Path, start: Mapping[str, Any]) -> None:
    """Keep what is known of a job that starts or goes on with the run.

    Raises:
        OSError: If it cannot be written.
    """
    file = AppendFile(tracking_folder(run_dir) / STARTS_FILE)
    try:
        error = file.append((to_json(start) + "\n").encode())
    finally:
        file.close()
    if error is not None:
        raise error


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return what is known of the jobs of a run, in order; nothing of a run that was not tracked.

    Raises:
        OSError: If it cannot be read.
    """
    try:
        lines = list(lines_of(run_dir / FOLDER / STARTS_FILE))
    except FileNotFoundError:
        return []
    starts = [start for line in lines if (start := parse_line(line)) is not None]
    return [start for start in starts if isinstance(start.get("step"), int)]


def without_password(text: str) -> str:
    """Return a text for files and messages: of its addresses without user, password and query."""
    return _ADDRESS.sub(_shown, text)


def _shown(address: re.Match[str]) -> str:
    before, _, query = address[0].partition("?")
    if "@" in query:  # the question mark may be one of the password's
        return "..."
    return before.rpartition("@")[2]
