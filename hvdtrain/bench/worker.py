"""A worker of a program that ``bench`` launches: it does what a file says, and writes what it found."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.bench.alone import bench_module
from hvdtrain.bench.job import Request, bench_job
from hvdtrain.bench.peer import Place
from hvdtrain.config import Layer
from hvdtrain.host.output import make_output_tolerant

HVDTRAIN = "hvdtrain"


def layers_to_json(layers: list[Layer]) -> list[Any]:
    """Return config layers as JSON holds them."""
    return [asdict(layer) for layer in layers]


def work(specification: dict[str, Any]) -> None:
    """Collective. Do what a specification says, and write what was found, on rank 0."""
    layers = [Layer(**one) for one in specification["layers"]]
    if specification["program"] == HVDTRAIN:
        result = bench_job(layers, Request(**specification["request"]))
        found = None if result is None else result.to_document()
    else:
        place = Place(**specification["place"])
        peer = bench_module(specification["framework"], "peer")
        found = peer.run_peer(specification["program"], layers, place, specification["steps"])
    if found is not None:
        Path(specification["found"]).write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    """Run a worker, and end it as the command line would."""
    make_output_tolerant()
    try:
        work(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except BaseException as error:
        from hvdtrain.jobs.failures import end_worker

        end_worker(error, debug=False)


if __name__ == "__main__":
    main()
