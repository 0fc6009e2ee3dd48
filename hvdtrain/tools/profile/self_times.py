"""How long operations took themselves, without those that they called."""

from collections import defaultdict

from hvdtrain.backends.recording import KERNEL, OPERATION, Operation
from hvdtrain.tools.profile.recording import Recording
from hvdtrain.workers.activity import TRAINING

_COLLECTIVE = "Horovod"  # operations that wait for other workers are counted as communication


def self_seconds(recording: Recording) -> dict[str, float]:
    """Return the seconds of each operation of a worker in its steps, by name.

    Of a device it is the time of its work. On the host it is the operation's own time, without that of
    operations which it called in the same thread.
    """
    kinds = {span.kind for span in recording.operations.spans}
    kind = KERNEL if KERNEL in kinds else OPERATION
    steps = [(p.begin_ns, p.end_ns) for p in recording.phases if p.name == TRAINING]
    by_thread: dict[int, list[Operation]] = defaultdict(list)
    for span in recording.operations.spans:
        if span.kind == kind and not span.name.startswith(_COLLECTIVE):
            by_thread[span.thread].append(span)
    seconds: dict[str, float] = defaultdict(float)
    for spans in by_thread.values():
        for name, nanoseconds in _own(spans, steps if kind == OPERATION else None):
            seconds[name] += nanoseconds / 1e9
    return dict(seconds)


def _own(spans: list[Operation], steps: list[tuple[int, int]] | None) -> list[tuple[str, int]]:
    """Return name and own nanoseconds of each span of a thread that begins in a step."""
    found: list[tuple[str, int]] = []
    open_spans: list[tuple[int, int]] = []  # place in `found`, end
    place = 0
    for span in sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)):
        if steps is not None:
            while place < len(steps) and steps[place][1] <= span.begin_ns:
                place += 1
            if place == len(steps) or span.begin_ns < steps[place][0]:
                continue
        while open_spans and open_spans[-1][1] <= span.begin_ns:
            open_spans.pop()
        length = span.end_ns - span.begin_ns
        if open_spans:
            parent, end_ns = open_spans[-1]
            name, own = found[parent]
            found[parent] = name, max(0, own - min(length, end_ns - span.begin_ns))
        open_spans.append((len(found), span.end_ns))
        found.append((span.name, length))
    return found
