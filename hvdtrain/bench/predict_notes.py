"""What a plan leaves out that these predictions need: notes on links, and on large batches."""

from collections.abc import Sequence

from hvdtrain.bench.message_times import words_for_size
from hvdtrain.bench.predict_link import Link
from hvdtrain.bench.predict_record import Record
from hvdtrain.bench.spread import in_digits
from hvdtrain.words import counted

_MIB = 2**20
_UNLIKE = 1.5  # times as long, for the same computing
_USUAL_WINDOW = 4 * _MIB  # of a TCP connection on Linux, without settings of one's own


def notes_on_sizes(largest: int, wanted: int) -> list[str]:
    """Return a note if sums were not measured up to the size that was wanted, in bytes."""
    if largest >= wanted:
        return []
    return [
        f"all-reduces of more than {words_for_size(largest)} were left out, their time was up: larger ones "
        "are extrapolated"
    ]


def notes_on(records: Sequence[Record], links: Sequence[Link | None], counts: Sequence[int]) -> list[str]:
    """Return the notes, each once.

    Args:
        records: the measurements.
        links: the links that are predicted for.
        counts: the numbers of workers that are predicted for.
    """
    notes = [
        f"{link.name} is full with {link.window_bytes / _MIB:,.0f} MiB under way: TCP connections with "
        "smaller windows take longer than predicted"
        for link in links
        if link is not None and link.window_bytes > _USUAL_WINDOW
    ]
    notes += _notes_on_computing(records)
    for record in records:
        samples, data = record.measured.samples, record.data_samples
        beyond = [count for count in counts if count * samples > data]
        if beyond:
            notes.append(
                f"from {counted(min(beyond), 'worker')} on, one step has more samples than the training data "
                f"({data:,})"
            )
    return list(dict.fromkeys(notes))


def _notes_on_computing(records: Sequence[Record]) -> list[str]:
    """Return a note if computing took longer over one controller, although it communicates nothing."""
    by_time = sorted(records, key=lambda record: record.measured.compute.median)
    if not by_time:
        return []
    least, most = (one.measured for one in (by_time[0], by_time[-1]))
    if most.workers != least.workers or most.compute.median < _UNLIKE * least.compute.median:
        return []
    said = " and ".join(
        f"{in_digits(one.compute.median * 1e3, 3)} ms over {one.controller}" for one in (least, most)
    )
    return [
        f"computing took {said}, which are measured one after the other: the machine did not give both the "
        "same, so do not compare their samples/s; measure again on an idle machine"
    ]
