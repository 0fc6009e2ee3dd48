"""Workers' processes: start one in a slot of any host, signal it, kill it."""

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from horovod.runner.common.util.settings import Settings
from horovod.runner.gloo_run import _exec_command_fn, _mkdir_p
from horovod.runner.util import network
from horovod.runner.util.remote import get_remote_command

from hvdtrain.elastic.driver.cluster import SSH_FAILED, Slot
from hvdtrain.host.launcher import ELASTIC_VARIABLE, SLOT_VARIABLE, WORKER_VARIABLE
from hvdtrain.host.processes import SAME_START_SECONDS, kill_if_same, run_limited
from hvdtrain.workers.world import KEY_VARIABLE

_HOST_VARIABLE = "HOROVOD_HOSTNAME"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
_CONNECT_SECONDS = 5
_KILL_SECONDS = 15
# what belongs to one world, or to another launch that this one runs in
_NOT_PASSED_ON = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_ELASTIC",
    _HOST_VARIABLE, WORKER_VARIABLE, SLOT_VARIABLE,
)  # fmt: skip
_KILL_FAR = """
import sys, psutil
process = psutil.Process(int(sys.argv[1]))
if abs(process.create_time() - float(sys.argv[2])) < float(sys.argv[3]):
    process.kill()
"""


@dataclass(frozen=True)
class StartOptions:
    """How workers are started."""

    command: Sequence[str]  # the command of every worker
    # the environment of every worker, without what is its own
    environ: Mapping[str, str] = field(default_factory=dict)
    ssh_port: int | None = None  # of sshd on other hosts; None for ssh's default
    ssh_identity_file: str | None = None  # the private key; None for ssh's default
    output_folder: str | None = None  # where the output of each worker is also written; None for nowhere
    has_timestamps: bool = False  # whether lines of output have the time before them
    verbose: bool = False  # whether the commands are shown

    def settings(self) -> Any:
        """Return the settings with which Horovod's launcher starts a worker."""
        return Settings(
            num_proc=2,  # of it, only the width of a rank in the name of an output folder is made
            verbose=2 if self.verbose else 0,
            ssh_port=self.ssh_port,
            ssh_identity_file=self.ssh_identity_file,
            output_filename=self.output_folder,
            elastic=True,  # the end of a worker ends no other one
            prefix_output_with_timestamp=self.has_timestamps,
        )


def job_environment(
    environ: Mapping[str, str], job_key: str, addresses: Sequence[tuple[str, int]]
) -> dict[str, str]:
    """Return the environment of all workers of a job."""
    kept = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    return {
        "PYTHONHASHSEED": "0",  # sets of strings must have the same order in all workers
        **kept,
        "PYTHONUNBUFFERED": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        KEY_VARIABLE: job_key,
        ELASTIC_VARIABLE: ",".join(f"{address}:{port}" for address, port in addresses),
    }


@dataclass(frozen=True)
class _SlotInfo:
    """What Horovod's launcher requests of a slot: the tag of its output, and its host."""

    rank: str
    hostname: str


class WorkerProcess:
    """A worker's process, and the processes that start it and forward its output."""

    def __init__(self) -> None:
        self._requests = {number: threading.Event() for number in SIGNALS}
        for number, request in self._requests.items():
            request.signum = number  # type: ignore[attr-defined] # which Horovod's launcher sends
        self._disconnect = threading.Event()  # without a number: end the ssh client
        self._is_far = False

    @property
    def events(self) -> list[threading.Event]:
        """What Horovod's launcher waits for while the worker runs."""
        return [*self._requests.values(), self._disconnect]

    def signal(self, number: int) -> None:
        """Send SIGTERM, SIGINT or SIGKILL, each once. It does not wait, and reaches workers of this host."""
        self._requests[signal.Signals(number)].set()

    def kill(self) -> None:
        """Kill the worker, even a stopped one; end the connection to one on another host. Without waiting."""
        self._requests[signal.SIGKILL].set()
        if self._is_far:
            self._disconnect.set()

    def is_on_another_host(self) -> None:
        """Note that the worker runs on another host, which signals from here do not reach."""
        self._is_far = True
        if self._requests[signal.SIGKILL].is_set():
            self._disconnect.set()


def start_worker(
    options: StartOptions, worker: str, slot: Slot, on_exit: Callable[[int], None], process: WorkerProcess
) -> None:
    """Start a worker, on another host over ssh; its output has its name as tag. It does not wait."""
    settings = options.settings()
    if options.output_folder:
        _mkdir_p(options.output_folder)
    own = {WORKER_VARIABLE: worker, SLOT_VARIABLE: str(slot.number), _HOST_VARIABLE: slot.host}
    environ = {**options.environ, **own}

    def run() -> None:
        code = 1
        try:
            command = shlex.join(options.command)
            if is_this_host(slot.host):
                # A shell that starts the worker and waits for it could be killed in its place, just before it
                # starts it. On another host, Horovod's launcher writes the same.
                command = f"exec {command}"
            else:
                process.is_on_another_host()
            execute = _exec_command_fn(settings, environ)
            code, _ = execute(command, _SlotInfo(worker, slot.host), process.events)
        finally:
            on_exit(_with_signal(code))

    threading.Thread(target=run, name=f"process of {worker}", daemon=True).start()


def _with_signal(code: int) -> int:
    """Return the exit code of a shell with that of a signal as a negative number."""
    is_signal = 128 < code < SSH_FAILED and code - 128 in {int(one) for one in signal.valid_signals()}
    return 128 - code if is_signal else code


def is_this_host(host: str) -> bool:
    """Return whether workers of a host start without ssh, as Horovod's launcher decides it."""
    return network.resolve_host_address(host) in network.get_local_host_addresses()


def kill_process(options: StartOptions, host: str, pid: int, process_seconds: float) -> None:
    """Kill a process of any host unless its number is another process's now. It does not wait."""

    def run() -> None:
        if is_this_host(host):
            kill_if_same(pid, process_seconds)
            return
        words = [sys.executable, "-c", _KILL_FAR, str(pid), repr(process_seconds), str(SAME_START_SECONDS)]
        quoted, (port, key) = shlex.quote(shlex.join(words)), (options.ssh_port, options.ssh_identity_file)
        with suppress(OSError):
            command = get_remote_command(quoted, host, port, key, _CONNECT_SECONDS)
            run_limited(["/bin/sh", "-c", command], _KILL_SECONDS)

    threading.Thread(target=run, name=f"end of process {pid}", daemon=True).start()
