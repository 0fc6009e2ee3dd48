"""TensorBoard event files: TensorBoard's own protocol buffers, appended record by record.

An event file is a row of records (TFRecord): length, checksum of the length, data, checksum of the data. The
data of each is an ``Event``. TensorBoard's own writer of records is not used: importing it takes a second.
"""

import os
import re
import struct
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING

from hvdtrain.reporting.jsonl import AppendFile


def text_summary(tag: str, text: str) -> Summary:
    """Return a summary with a text, which TensorBoard shows as Markdown."""
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[text.encode()])
    data = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary(value=[Summary.Value(tag=f"{tag}/text_summary", tensor=tensor, metadata=data)])


def image_summary(tag: str, png: bytes) -> Summary:
    """Return a summary with an image, given as a PNG file."""
    width, height = struct.unpack(">II", png[16:24])  # of its header
    image = Summary.Image(height=height, width=width, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


_NAME = re.compile(r"events\.out\.tfevents\.(\d{1,11})\..*")


class EventFile(AppendFile):
    """A TensorBoard event file with scalars."""

    def __init__(
        self, folder: Path, resumed_step: int | None = None, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        seconds = int(time.time())
        if resumed_step is not None:  # readers take files by name, and another host's clock may be ahead
            found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
            seconds = max(seconds, 1 + max((int(match[1]) for match in found if match), default=0))
        path = folder / f"events.out.tfevents.{seconds}.{os.getpid()}.hvdtrain"
        super().__init__(path, may_write=may_write)
        self._add(file_version="brain.Event:2")
        if resumed_step is not None:
            self._add(step=resumed_step + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, values: Mapping[str, float], step: int) -> OSError | None:
        """Add scalars at a step; return what went wrong, if something did."""
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        return self.add_summary(Summary(value=scalars), step)

    def add_summary(self, summary: Summary, step: int) -> OSError | None:
        """Add a ``Summary`` at a step; return what went wrong, if something did."""
        return self._add(step=step, summary=summary)

    def _add(self, **event: Any) -> OSError | None:
        data = Event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        return self.append(length + _masked_checksum(length) + data + _masked_checksum(data))


def _masked_checksum(data: bytes) -> bytes:
    """Return the CRC-32C of data, rotated and shifted as TFRecord wants it."""
    table, checksum = _table(), 0xFFFFFFFF
    for byte in data:
        checksum = table[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    checksum ^= 0xFFFFFFFF
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _table() -> list[int]:
    """Return the table of CRC-32C (Castagnoli): its polynomial 0x1EDC6F41 has its bits reversed here."""
    entries = list(range(256))
    for _ in range(8):
        entries = [entry >> 1 ^ (0x82F63B78 if entry & 1 else 0) for entry in entries]
    return entries
