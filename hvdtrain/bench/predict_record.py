"""A measurement for plans as a JSON document, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hvdtrain.bench.predict import Measured
from hvdtrain.bench.predict_curve import Curve
from hvdtrain.bench.predict_ways import Way
from hvdtrain.bench.spread import Spread

VERSION = 2  # of the documents with measurements
_SPREADS = ("step", "data", "compute", "lag")
_OF_WAY = ("encoding", "summing")


@dataclass(frozen=True)
class Record:
    """A measurement with what it is of.

    Attributes:
        task: the task.
        device: framework, version and device, in words.
        own_way: the name of the way that the job's config asks for.
        measured: what was measured.
        data_samples: samples of the training data.
        warnings: why figures may be wrong.
        notes: what else the user should know.
    """

    task: str
    device: str
    own_way: str
    measured: Measured
    data_samples: int
    warnings: Sequence[str] = field(default=())
    notes: Sequence[str] = field(default=())

    @property
    def way(self) -> Way:
        """The job's own way."""
        return next(way for way in self.measured.ways if way.name == self.own_way)

    def to_document(self) -> dict[str, Any]:
        """Return it as JSON holds it; times are in seconds."""
        return {
            "task": self.task,
            "device": self.device,
            "own_way": self.own_way,
            "measured": asdict(self.measured),
            "data_samples": self.data_samples,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


def record_from(document: Mapping[str, Any]) -> Record:
    """Return the record of a document that ``to_document`` has made.

    Raises:
        KeyError, TypeError, ValueError: If it is another document.
    """
    measured = document["measured"]
    plain = {one.name: measured[one.name] for one in fields(Measured)}
    spreads = {name: Spread(**measured[name]) for name in _SPREADS}
    points = [(int(size), Spread(**seconds)) for size, seconds in measured["curve"]["points"]]
    raw = None if measured["raw"] is None else Spread(**measured["raw"])
    ways = [Way(**{**way, **{name: Spread(**way[name]) for name in _OF_WAY}}) for way in measured["ways"]]
    found = Record(
        document["task"],
        document["device"],
        document["own_way"],
        Measured(**{**plain, **spreads, "curve": Curve(points), "raw": raw, "ways": ways}),
        int(document["data_samples"]),
        document["warnings"],
        document["notes"],
    )
    if found.measured.workers < 2 or not points or found.own_way not in {way.name for way in ways}:
        raise ValueError("it is no measurement of two workers or more")
    return found
