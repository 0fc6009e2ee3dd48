"""A run's config for TensorBoard: hyperparameters and texts, encoded as ``event_file.py`` encodes scalars.

- https://github.com/tensorflow/tensorboard/blob/master/tensorboard/plugins/hparams/plugin_data.proto
- https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/tensor.proto
- https://protobuf.dev/reference/protobuf/google.protobuf/#value
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.reporting.event_file import encoded_bytes, encoded_key, encoded_varint

_DOUBLE = 1  # wire type
_VALUE = 1  # of Summary
_TAG, _TENSOR, _METADATA = 1, 8, 9  # of Summary.Value
_PLUGIN_DATA = 1  # of SummaryMetadata
_PLUGIN_NAME, _CONTENT = 1, 2  # of PluginData
_DTYPE, _SHAPE, _STRING_VALUES = 1, 2, 8  # of TensorProto
_FLOAT_TYPE, _STRING_TYPE = 1, 7  # of DataType
_SESSION_START, _SESSION_END = 3, 4  # of HParamsPluginData
_HPARAMS, _GROUP_NAME, _START_SECONDS = 1, 4, 5  # of SessionStartInfo
_STATUS, _END_SECONDS = 1, 2  # of SessionEndInfo
_SUCCESS = 1  # of Status
_KEY, _MAP_VALUE = 1, 2  # of an entry of a map
_NUMBER, _STRING, _BOOL = 2, 3, 4  # of google.protobuf.Value


def text_summary(tag: str, text: str) -> bytes:
    """Return a summary with a text, which TensorBoard shows as Markdown."""
    tensor = (
        encoded_varint(_DTYPE, _STRING_TYPE)
        + encoded_bytes(_SHAPE, b"")
        + encoded_bytes(_STRING_VALUES, text.encode())
    )
    return _summary(f"{tag}/text_summary", "text", b"", tensor)


def session_start(config: Mapping[str, Any], name: str, seconds: float) -> bytes:
    """Return a summary with a run's hyperparameters.

    Args:
        config: the config; what is no number, text or truth value is shown as a text.
        name: the run's name.
        seconds: when it began, since the epoch of the system's clock.
    """
    hparams = b"".join(
        encoded_bytes(
            _HPARAMS, encoded_bytes(_KEY, key.encode()) + encoded_bytes(_MAP_VALUE, _encoded(value))
        )
        for key, value in _flat(config)
    )
    start = hparams + encoded_bytes(_GROUP_NAME, name.encode()) + _double(_START_SECONDS, seconds)
    return _hparams("session_start_info", encoded_bytes(_SESSION_START, start))


def session_end(seconds: float) -> bytes:
    """Return a summary that says that a run is complete."""
    end = encoded_varint(_STATUS, _SUCCESS) + _double(_END_SECONDS, seconds)
    return _hparams("session_end_info", encoded_bytes(_SESSION_END, end))


def _hparams(tag: str, content: bytes) -> bytes:
    empty = encoded_varint(_DTYPE, _FLOAT_TYPE) + encoded_bytes(_SHAPE, b"")
    return _summary(f"_hparams_/{tag}", "hparams", content, empty)


def _summary(tag: str, plugin: str, content: bytes, tensor: bytes) -> bytes:
    data = encoded_bytes(_PLUGIN_NAME, plugin.encode())
    data += encoded_bytes(_CONTENT, content) if content else b""
    value = (
        encoded_bytes(_TAG, tag.encode())
        + encoded_bytes(_TENSOR, tensor)
        + encoded_bytes(_METADATA, encoded_bytes(_PLUGIN_DATA, data))
    )
    return encoded_bytes(_VALUE, value)


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", value


def _encoded(value: object) -> bytes:
    """Return a value as a ``google.protobuf.Value``."""
    if isinstance(value, bool):
        return encoded_varint(_BOOL, int(value))
    if isinstance(value, int | float):
        return _double(_NUMBER, float(value))
    return encoded_bytes(_STRING, str(value).encode())


def _double(field: int, value: float) -> bytes:
    return encoded_key(field, _DOUBLE) + struct.pack("<d", value)
