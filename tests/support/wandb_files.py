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


def history_of(path: Path) -> list[dict[str, Any]]:
    """Give the rows that were logged."""
    rows = [record.history for record in records_of(path) if record.WhichOneof("record_type") == "history"]
    return [{_name(item): json.loads(item.value_json) for item in row.item} for row in rows]


def config_of(path: Path) -> dict[str, Any]:
    """Give the config as it was last."""
    found: dict[str, Any] = {}
    for record in records_of(path):
        kind = record.WhichOneof("record_type")
        config = record.run.config if kind == "run" else record.config if kind == "config" else None
        if config is not None:
            found |= {_name(item): json.loads(item.value_json) for item in config.update}
    return found


def exit_code_of(path: Path) -> int | None:
    """Give the exit code of a run that has ended."""
    codes = [
        record.exit.exit_code for record in records_of(path) if record.WhichOneof("record_type") == "exit"
    ]
    return codes[-1] if codes else None


def run_id_of(path: Path) -> str:
    """Give the id of the run."""
    return next(r.run.run_id for r in records_of(path) if r.WhichOneof("record_type") == "run")


def _name(item: Any) -> str:
    return "/".join(item.nested_key) or item.key
