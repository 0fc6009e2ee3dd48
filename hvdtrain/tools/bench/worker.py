"""A worker of a program that ``bench`` launches: it does what a file says, and writes what it found."""

import json
from pathlib import Path
from typing import Any

from hvdtrain.tools.bench.job import Request, bench_job
from hvdtrain.tools.launch import layers_from_json, run_worker


def work(specification: dict[str, Any]) -> None:
    """Collective. Do what a specification says, and write what was found, on rank 0."""
    layers = layers_from_json(specification["layers"])
    result = bench_job(layers, Request(**specification["request"]))
    if result is not None:
        Path(specification["found"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    run_worker(work)
