"""A worker of a job that ``plan`` launches: it measures what a file says, and writes what it found."""

import json
from pathlib import Path
from typing import Any

from hvdtrain.bench.predict_measure import measure_job
from hvdtrain.bench.worker import layers_from_json, run_worker


def work(specification: dict[str, Any]) -> None:
    """Collective. Measure the job that a specification names, and write what was found, on rank 0."""
    record = measure_job(layers_from_json(specification["layers"]), specification["seconds"])
    if record is not None:
        text = json.dumps(record.to_document())
        Path(specification["found"]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_worker(work)
