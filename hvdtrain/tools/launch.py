"""Launching jobs of tools: with a time limit, nothing left running after them; and their workers."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.config import Layer
from hvdtrain.config.yaml_reader import parse_yaml, write_yaml
from hvdtrain.errors import ConfigError, EnvironmentFault, UsageError
from hvdtrain.horovod_build.installed import horovodrun_path
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.host.launcher import host_name
from hvdtrain.host.output import make_output_tolerant
from hvdtrain.host.processes import kill_group, start_group
from hvdtrain.storage.text import counted

_END_SECONDS = 15.0
_REMEDY = "If its steps take seconds, give a larger --seconds, from which this limit follows."
LARGER_LIMIT = "Give a larger --limit, or a smaller task."
_LINES = 20  # of the output, in an error
_BYTES = 2**16  # of its end, among which they are


class RunningJob:
    """Context manager: a command that runs; at its end none of its processes that started here is left."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the context
        given = {**os.environ, **(environ or {})}
        self.process = start_group(command, env=given, stdout=self._output, stderr=subprocess.STDOUT)

    def __enter__(self) -> "RunningJob":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.wait(_END_SECONDS)
        kill_group(self.process, _END_SECONDS)
        self._output.close()

    def wait(self, seconds: float) -> tuple[int | None, str]:
        """Wait for the end; return the exit code, None if it did not end in time, and the last output."""
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
        descriptor = self._output.fileno()  # whose position processes that still write share
        end = os.pread(descriptor, _BYTES, max(0, os.fstat(descriptor).st_size - _BYTES))
        return code, "\n".join(end.decode(errors="replace").splitlines()[-_LINES:])


def horovodrun(workers: int, hosts: str, controller: str | None) -> list[str]:
    """Return the words that launch workers; none for one worker on this host, which needs no launcher."""
    if workers == 1 and parse_host_list(hosts)[0].name in ("localhost", "127.0.0.1", host_name()):
        return []
    chosen = [f"--{controller}"] if controller else []
    return [horovodrun_path(), *chosen, "-np", str(workers), "-H", hosts]


def run_module(  # noqa: PLR0917 - what may differ is given last
    name: str,
    launcher: Sequence[str],
    module: str,
    values: Mapping[str, Any],
    folder: Path,
    limit_seconds: float,
    environ: Mapping[str, str] | None = None,
    remedy: str = _REMEDY,
) -> Any:
    """Let the workers of a module, which calls ``run_worker``, take values, and return what they found."""
    path, found = folder / "values.json", folder / "found.json"
    folder.mkdir(exist_ok=True)
    found.unlink(missing_ok=True)
    path.write_text(json.dumps({**values, "found": str(found)}), encoding="utf-8")
    command = [*launcher, sys.executable, "-m", module, str(path)]
    return run_program(name, command, limit_seconds, found, environ, remedy)


def run_program(  # noqa: PLR0917 - what may differ is given last
    name: str,
    command: Sequence[str],
    limit_seconds: float,
    found: Path,
    environ: Mapping[str, str] | None = None,
    remedy: str = _REMEDY,
) -> Any:
    """Run a command to its end, and return the JSON that it has written to a file."""
    with RunningJob(command, environ) as job:
        code, text = job.wait(limit_seconds)
    if code is None:
        problem = f"{name} did not end within {limit_seconds:.0f} s and was ended"
        raise EnvironmentFault(problem, remedy + (f"\n{text}" if text else ""))
    if code or not found.is_file():
        ended = f"with exit code {code}" if code else "without a result"
        raise EnvironmentFault(f"{name} ended {ended}", text)
    return json.loads(found.read_text(encoding="utf-8"))


def check_slots(counts: Sequence[int], hosts: str | None, may_share: bool = True) -> str:
    """Return hosts and slots, as horovodrun takes them."""
    if hosts is None:
        slots = len(os.sched_getaffinity(0))
        share = f" To share cores, which makes all slower: -H localhost:{counts[-1]}."
        where, noun, remedy = "this host has", "core", share if may_share else ""
        hosts = f"localhost:{max(slots, 1)}"
    else:
        slots = sum(host.slots for host in parse_host_list(hosts))
        where, noun, remedy = "the hosts of -H have", "slot", " Name more hosts or slots."
    if counts[-1] > slots:
        raise UsageError(
            f"{counted(counts[-1], 'worker')} need a slot each; {where} {counted(slots, noun)}",
            f"Give a smaller number of workers.{remedy}",
        )
    return hosts


def layers_to_json(layers: Iterable[Layer]) -> list[dict[str, Any]]:
    """Return config layers as JSON: values as YAML, which keeps keys that are numbers, and dates."""
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


def run_worker(work: Callable[[dict[str, Any]], Any]) -> None:
    """Give work the values of the file that the command line names, and write what it found, if it did."""
    make_output_tolerant()
    try:
        values = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        if (found := work(values)) is not None:
            Path(values["found"]).write_text(json.dumps(found), encoding="utf-8")
    except BaseException as error:
        from hvdtrain.jobs.failures import end_worker

        end_worker(error, debug=False)
