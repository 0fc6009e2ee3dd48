"""What W&B's library writes without a server, read with its own protocol buffers.

A ``.wandb`` file is a log as LevelDB has it: blocks of 32 KiB with parts of records, each with checksum, size
and type (whole, first, middle, last); https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _PART = 32768, struct.Struct("<IHB")
_FIRST_BYTE = 7  # after the header of the file
_WHOLE, _FIRST, _LAST = 1, 2, 4


def records_of(path: Path) -> Iterator[Any]:
    """Yield the records of a file."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record = path.read_bytes(), _FIRST_BYTE, b""
    while at + _PART.size <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _PART.size:
            at += left
            continue
        _, size, kind = _PART.unpack_from(content, at)
        part = content[at + _PART.size : at + _PART.size + size]
        at += _PART.size + size
        record = part if kind in (_WHOLE, _FIRST) else record + part
        if kind in (_WHOLE, _LAST):
            found = Record()
            found.ParseFromString(record)
            yield found


def parts_of(path: Path, kind: str) -> list[Any]:
    """Give what the records of a kind hold."""
    return [getattr(record, kind) for record in records_of(path) if record.WhichOneof("record_type") == kind]


def history_of(path: Path) -> list[dict[str, Any]]:
    """Give the rows that were logged."""
    return [_values(row.item) for row in parts_of(path, "history")]


def config_of(path: Path) -> dict[str, Any]:
    """Give the config as it was last."""
    found: dict[str, Any] = {}
    for config in [*(run.config for run in parts_of(path, "run")), *parts_of(path, "config")]:
        found |= _values(config.update)
    return found


def exit_code_of(path: Path) -> int | None:
    """Give the exit code of a run that has ended."""
    return next((end.exit_code for end in reversed(parts_of(path, "exit"))), None)


def run_id_of(path: Path) -> str:
    """Give the id of the run."""
    return parts_of(path, "run")[0].run_id


def _values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
