"""A measurement with what other measurements say of its predictions; in the files that ``plan`` writes."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.bench.predict import alone_share
from hvdtrain.bench.predict_forecast import Check, check_here, check_other, largest_error
from hvdtrain.bench.predict_record import VERSION, Record, record_from
from hvdtrain.bench.spread import in_digits
from hvdtrain.errors import UsageError
from hvdtrain.words import counted


@dataclass(frozen=True)
class Evidence:
    """A measurement, and what others say of its predictions.

    Attributes:
        record: the measurement.
        checks: steps that were predicted and measured.
    """

    record: Record
    checks: Sequence[Check]

    @property
    def warnings(self) -> list[str]:
        """Why figures may be wrong: what disturbed the measurement, and parts that do not fit the step."""
        measured = self.record.measured
        found = list(self.record.warnings)
        shortest = in_digits(measured.step.low * 1e3, 3)
        text = (
            f"the shortest steps of the job ({shortest} ms) are shorter than what its workers took on their "
            "own, so something disturbed the measurement and ranges are wide: measure on an idle machine"
        )
        if alone_share(measured) < 1 and text not in found:  # as a document of a plan has it
            found.append(text)
        return found

    @property
    def error(self) -> float:
        """The largest error of the checks."""
        return largest_error(self.checks)

    def to_document(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        document = {**self.record.to_document(), "warnings": self.warnings}
        return {**document, "checks": [asdict(check) for check in self.checks]}


def evidence_of(record: Record, other: Record | None = None) -> Evidence:
    """Return a measurement with its checks.

    Args:
        record: the measurement.
        other: that of the same job with another number of workers on the same hosts.
    """
    checks = [check_here(record.measured)]
    if other is not None:
        count = counted(other.measured.workers, "worker")
        theirs = [f"measurement of {count}: {text}" for text in other.warnings]
        record = replace(record, warnings=[*record.warnings, *theirs])
        pairs = ((record.measured, other.measured), (other.measured, record.measured))
        checks += [check for one, another in pairs if (check := check_other(one, another))]
    return Evidence(record, checks)


def read_evidence(path: Path) -> list[Evidence]:
    """Return the measurements that an earlier plan has written.

    Raises:
        UsageError: If the file cannot be read, or is no plan's.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        found = document["measurements"]
        if document["version"] != VERSION:
            raise UsageError(
                f"--from {path}: it is of version {document['version']}, and only {VERSION} is known here",
                "Measure again: python -m hvdtrain plan --json FILE ...",
            )
        evidence = [Evidence(record_from(one), [Check(**check) for check in one["checks"]]) for one in found]
        if not evidence:
            raise ValueError("it has no measurement")
    except OSError as error:
        raise UsageError(f"--from {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        raise UsageError(
            f"--from {path}: it is not a document that plan --json writes",
            "Measure again: python -m hvdtrain plan --json FILE ...",
        ) from None
    return evidence
