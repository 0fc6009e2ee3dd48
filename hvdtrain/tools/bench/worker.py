"""A worker of a program that ``bench`` launches: it does what a file says, and writes what it found."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.config import Layer
from hvdtrain.config.yaml_reader import parse_yaml, write_yaml
from hvdtrain.errors import ConfigError
from hvdtrain.host.output import make_output_tolerant
from hvdtrain.tools.bench.job import Request, bench_job


def layers_to_json(layers: Iterable[Layer]) -> list[dict[str, Any]]:
    """Return config layers as JSON holds them: values as YAML, which keeps keys that are numbers, and dates.

    Raises:
        ConfigError: If a value is none that YAML can hold.
    """
    found = []
    for layer in layers:
        try:
            values = write_yaml(dict(layer.values))
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{layer.source}: its values cannot be handed on: {error}",
                "Use numbers, text, lists and mappings.",
            ) from None
        found.append({"source": layer.source, "values": values, "is_file": layer.is_file})
    return found


def layers_from_json(found: Iterable[Mapping[str, Any]]) -> list[Layer]:
    """Return what ``layers_to_json`` was given."""
    return [
        Layer(one["source"], parse_yaml(one["values"], one["source"]), is_file=one["is_file"])
        for one in found
    ]


def work(specification: dict[str, Any]) -> None:
    """Collective. Do what a specification says, and write what was found, on rank 0."""
    layers = layers_from_json(specification["layers"])
    result = bench_job(layers, Request(**specification["request"]))
    if result is not None:
        Path(specification["found"]).write_text(json.dumps(result), encoding="utf-8")


def run_worker(work: Callable[[dict[str, Any]], None]) -> None:
    """Do what the file says that the command line names, and end this worker as the command line would.

    Args:
        work: is given what the file says.
    """
    make_output_tolerant()
    try:
        work(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except BaseException as error:
        from hvdtrain.jobs.failures import end_worker

        end_worker(error, debug=False)


if __name__ == "__main__":
    run_worker(work)
