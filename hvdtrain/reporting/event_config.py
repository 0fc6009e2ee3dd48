"""A run's config for TensorBoard: hyperparameters and texts."""

from collections.abc import Iterator, Mapping
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo


def text_summary(tag: str, text: str) -> Summary:
    """Return a summary with a text, which TensorBoard shows as Markdown."""
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[text.encode()])
    return _summary(f"{tag}/text_summary", "text", b"", tensor)


def session_start(config: Mapping[str, Any], name: str, seconds: float) -> Summary:
    """Return a summary with a run's hyperparameters.

    Args:
        config: the config; what is no number, text or truth value is shown as a text.
        name: the run's name.
        seconds: when it began, since the epoch of the system's clock.
    """
    start = SessionStartInfo(group_name=name, start_time_secs=seconds)
    for key, value in _flat(config):
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, int | float):
            start.hparams[key].number_value = value
        else:
            start.hparams[key].string_value = str(value)
    return _hparams("session_start_info", HParamsPluginData(session_start_info=start))


def session_end(seconds: float) -> Summary:
    """Return a summary that says that a run is complete."""
    end = SessionEndInfo(status=STATUS_SUCCESS, end_time_secs=seconds)
    return _hparams("session_end_info", HParamsPluginData(session_end_info=end))


def _hparams(tag: str, data: HParamsPluginData) -> Summary:
    empty = TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto())
    return _summary(f"_hparams_/{tag}", "hparams", data.SerializeToString(), empty)


def _summary(tag: str, plugin: str, content: bytes, tensor: TensorProto) -> Summary:
    data = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin, content=content))
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=data)])


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", value
