"""Nested tensors of any framework as messages between stages."""

from collections.abc import Callable
from typing import Any

from hvdtrain.backends.pipeline.messages import Bytes, Message
from hvdtrain.errors import TaskError

_TENSOR, _TUPLE, _LIST, _DICT, _VALUE = "tensor", "tuple", "list", "dict", "value"
_PLAIN = (bool, int, float, str, type(None))

# a tensor -> what describes it, of types that travel, and its bytes
Describe = Callable[[Any], tuple[Any, Bytes]]
# what describes a tensor and its bytes -> the tensor
Make = Callable[[Any, Bytes], Any]


def pack(value: Any, is_tensor: Callable[[Any], bool], describe: Describe) -> Message:
    """Return tensors within tuples, lists and dicts as a message.

    Args:
        value: the tensors.
        is_tensor: whether something is one.
        describe: of one tensor.

    Raises:
        TaskError: If there is something that cannot be sent.
    """
    buffers: list[Bytes] = []

    def described(part: Any) -> Any:
        if is_tensor(part):
            description, buffer = describe(part)
            buffers.append(buffer)
            return _TENSOR, description
        if type(part) in (tuple, list):
            return _TUPLE if type(part) is tuple else _LIST, [described(one) for one in part]
        if type(part) is dict and all(isinstance(key, str) for key in part):
            return _DICT, {key: described(one) for key, one in part.items()}
        if isinstance(part, _PLAIN):
            return _VALUE, part
        raise TaskError(
            f"a block of the model returns a {type(part).__name__}, which cannot be passed to the next stage",
            "Let blocks return tensors, or tuples, lists and dicts of them.",
        )

    return Message(described(value), buffers)


def unpack(message: Message, make: Make) -> Any:
    """Return the nested tensors of a message.

    Args:
        message: the message.
        make: of one tensor.
    """
    buffers = iter(message.buffers)

    def made(description: Any) -> Any:
        kind, content = description
        if kind == _TENSOR:
            return make(content, next(buffers))
        if kind in (_TUPLE, _LIST):
            parts = [made(one) for one in content]
            return tuple(parts) if kind == _TUPLE else parts
        if kind == _DICT:
            return {key: made(one) for key, one in content.items()}
        return content

    return made(message.description)
