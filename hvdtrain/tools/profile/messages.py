"""What Horovod reduces under a name, in words."""

import re
from collections.abc import Mapping

from hvdtrain.tools.profile.timeline import Timeline

_GRADIENTS = re.compile(r"(?:^|[./])hvdtrain\.gradients?\.")
_BFLOAT16 = re.compile(r"(?:^|[./])hvdtrain\.bf16(?:$|\.)")
_PREFIX = "allreduce."  # PyTorch's, of all names


def describe_message(tensor: str, timeline: Timeline, messages: Mapping[str, tuple[str, str]]) -> str:
    """Return what a tensor of the timeline is, and its bytes.

    Horovod has a name for each message: that of many gradients which travel together tells of one of them.

    Args:
        tensor: its name in the timeline.
        timeline: the timeline.
        messages: the first and the last parameter of messages of gradients, by name.
    """
    size = timeline.size_of(tensor)
    what = _what(tensor, timeline, messages)
    return f"{what}, {_words_for_bytes(size)}" if size else what


def _what(tensor: str, timeline: Timeline, messages: Mapping[str, tuple[str, str]]) -> str:
    if _BFLOAT16.search(tensor):
        return "gradients as bf16"
    if not _GRADIENTS.search(tensor):
        return tensor
    others = {span.tensor for span in timeline.spans if _GRADIENTS.search(span.tensor)} - {tensor}
    if not others:
        return "all gradients, which travel together"
    ends = messages.get(tensor.removeprefix(_PREFIX))
    if ends is None:
        return f"gradients ({tensor})"
    first, last = ends
    return f"the gradient of {first}" if first == last else f"the gradients from {first} to {last}"


def _words_for_bytes(size: int) -> str:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= least:
            return f"{size / least:.3g} {unit}"
    return f"{size} B"
