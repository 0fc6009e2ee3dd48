"""Launching jobs that are measured: with a time limit, nothing left running after them; and their workers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.config import Layer
from hvdtrain.config.yaml_reader import parse_yaml, write_yaml
from hvdtrain.errors import ConfigError, EnvironmentFault, UsageError
from hvdtrain.host.hostfile import parse_host_list
from hvdtrain.host.launcher import host_name
from hvdtrain.host.output import make_output_tolerant
from hvdtrain.host.processes import kill_group, start_group
from hvdtrain.storage.text import counted

_END_SECONDS = 15.0
_POLL_SECONDS = 0.05
_LINES = 15  # of the output, in an error
_BYTES = 2**16  # of its end, among which they are


@dataclass(frozen=True)
class Program:
    """A program: one process or more, which all start at once.

    Attributes:
        name: its name in messages.
        commands: the command of each process; of a launcher's one.
        limit_seconds: how long it may take.
        environ: environment variables in addition to those of this process.
    """

    name: str
    commands: Sequence[Sequence[str]]
    limit_seconds: float
    environ: Mapping[str, str] = field(default_factory=dict)


def horovodrun(workers: int, hosts: str, controller: str | None) -> list[str]:
    """Return the words that launch workers; none for one worker on this host, which needs no launcher.

    Args:
        workers: number of workers.
        hosts: hosts and slots.
        controller: "mpi", "gloo" or None.

    Raises:
        EnvironmentFault: If there is no horovodrun.
    """
    if workers == 1 and parse_host_list(hosts)[0].name in ("localhost", "127.0.0.1", host_name()):
        return []
    beside = Path(sys.executable).with_name("horovodrun")
    launcher = str(beside) if beside.is_file() else shutil.which("horovodrun")
    if launcher is None:
        raise EnvironmentFault("there is no horovodrun", "Run: python -m hvdtrain build-horovod")
    return [launcher, *([f"--{controller}"] if controller else []), "-np", str(workers), "-H", hosts]


@contextmanager
def exchange_folder(shared: bool) -> Iterator[Path]:
    """Return a context with a folder for what programs are to do and what they found.

    Args:
        shared: whether other hosts must see it: then it is in the working directory.
    """
    folder = Path(tempfile.mkdtemp(prefix=".hvdtrain-bench-", dir=os.getcwd() if shared else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_program(program: Program, found: Path) -> Any:
    """Run a program to its end, and return the JSON that it has written.

    Args:
        program: the program.
        found: the file in which it writes what it found.

    Raises:
        EnvironmentFault: If it fails or takes too long; with the end of its output.
    """
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        processes = stack.enter_context(_running(program, output))
        code = _wait(processes, program.limit_seconds)
        text = _end_of(output)
        if code is None:
            raise EnvironmentFault(
                f"{program.name} did not end within {program.limit_seconds:.0f} s and was ended",
                "If its steps take seconds, give a larger --seconds, from which this limit follows."
                + (f"\n{text}" if text else ""),
            )
    if code or not found.is_file():
        how = f"with exit code {code}" if code else "without a result"
        raise EnvironmentFault(f"{program.name} ended {how}", text)
    return json.loads(found.read_text(encoding="utf-8"))


@contextmanager
def _running(program: Program, output: Any) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return a context with a program's processes; at its end nothing is left of what they started here."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in program.commands:
            environ = {**os.environ, **program.environ}
            process = start_group(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            if code_of(process) is None:
                os.kill(process.pid, signal.SIGTERM)
        until = time.monotonic() + _END_SECONDS
        while None in map(code_of, processes) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        for process in processes:
            kill_group(process)


def _end_of(output: Any) -> str:
    """Return the last lines of a file that processes may still write to, whose position they share."""
    size = os.fstat(output.fileno()).st_size
    end = os.pread(output.fileno(), _BYTES, max(0, size - _BYTES))
    return "\n".join(end.decode(errors="replace").splitlines()[-_LINES:])


def code_of(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process, negative for a signal; None while it runs.

    It is not waited for, so that its number names no other process or group.
    """
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> int | None:
    """Wait until all processes ended well or one of them did not; return its code, None if time is up."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        codes = [code_of(process) for process in processes]
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(_POLL_SECONDS)
    return None


def write_specification(path: Path, values: Mapping[str, Any]) -> None:
    """Write what a worker is to do.

    Args:
        path: the file.
        values: what JSON can hold.
    """
    path.write_text(json.dumps(values), encoding="utf-8")


def check_slots(counts: Sequence[int], hosts: str | None, may_share: bool = True) -> str:
    """Return hosts and slots, as horovodrun takes them.

    Args:
        counts: numbers of workers, the largest last.
        hosts: the user's hosts and slots; None for this host's cores.
        may_share: whether the user may name more slots than cores.

    Raises:
        UsageError: If there are fewer slots than workers.
    """
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
