"""What ``bench`` has measured of a job, as a text."""

from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.storage.text import counted
from hvdtrain.tools.bench.message_times import words_for_size
from hvdtrain.tools.bench.spread import Spread

VERSION = 2  # of the documents
_PARTS = {
    "data": "waiting for data",
    "compute": "computing",
    "slowest": "waiting for the slowest worker",
    "communication": "exposed communication",
}


def describe_job(document: Mapping[str, Any]) -> str:
    """Return the text that rank 0 shows of a job's document."""
    workers = document["workers"]
    over = f" over {document['controller']}" if workers > 1 else ""
    step = Spread(**document["step_seconds"])
    rows = [
        ("speed", f"{Spread(**document['samples_per_second']).describe(0)} samples/s"),
        ("step", f"{_in_ms(step)}, {document['steps_timed']:,} steps timed"),
        *_part_rows(document),
    ]
    if document["threads"]:
        rows.append(("threads", f"{document['threads']} for each worker's computation"))
    if workers > 1:
        rows.append(("gradients", document["reduction"]))
    width = max(len(name) for name, _ in rows)
    sums = document["all_reduce"]
    return "\n".join([
        f"bench: {document['task']} with {document['device']}, {counted(workers, 'worker')}{over}, "
        f"{document['global_batch']:,} samples a step",
        *(f"  {name:<{width}}  {text}" for name, text in rows),
        *(["  all-reduce"] if sums else []),
        *(_sum_row(one["bytes"], one["horovod_seconds"]["median"]) for one in sums),
        *notes_and_warnings([document]),
    ])  # fmt: skip


def notes_and_warnings(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the lines of what documents note, each once, and then of their warnings."""
    lines = [
        f"  {kind}: {text}"
        for kind in ("note", "warning")
        for document in documents
        for text in document.get(f"{kind}s", ())
    ]
    return list(dict.fromkeys(lines))


def doubtful_parts(parts: Mapping[str, Spread], mean: float) -> list[str]:
    """Return a warning if a part of a mean step is more than all of it or less than nothing."""
    wrong = [_PARTS[name] for name, part in parts.items() if not _can_be(part.median / mean)]
    if not wrong:
        return []
    return [
        f"{' and '.join(wrong)} cannot be more than all of a step or less than nothing: steps with the "
        "other workers and without them were not disturbed alike, so the parts are not trustworthy; "
        "measure again on an idle machine, or with more --seconds"
    ]


def _part_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the mean step and its parts, which add up to it; nothing if they were not measured."""
    parts = {name: Spread(**part) for name, part in document["part_seconds"].items()}
    if not parts:
        return []
    mean = Spread(**document["mean_step_seconds"])
    if document["workers"] == 1:  # which waits for nobody
        parts = {name: part for name, part in parts.items() if (part.low, part.high) != (0, 0)}
    rows = [("mean step", f"{_in_ms(mean)}, of which")]
    return rows + [(f"  {_PARTS[name]}", _part(part, mean.median)) for name, part in parts.items()]


def _part(part: Spread, mean_seconds: float) -> str:
    is_nothing = part.low == part.high == 0
    noise = "; not above the noise" if part.low <= 0 and not is_nothing else ""
    share = part.median / mean_seconds
    doubt = "" if _can_be(share) else "; not trustworthy"
    return f"{_in_ms(part)}, {share:.0%} of it{noise}{doubt}"


def _can_be(share: float) -> bool:
    """Return whether a part can have this share of a step, as it is shown in whole percents."""
    return 0 <= round(100 * share) <= 100


def _in_ms(seconds: Spread) -> str:
    return f"{seconds.times(1e3).describe()} ms"


def _sum_row(size: int, seconds: float) -> str:
    return f"    {words_for_size(size):>8}  {seconds * 1e6:>10,.0f} us  {size / seconds / 1e6:>7,.0f} MB/s"
