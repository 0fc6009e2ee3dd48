"""Strangers at the doors of a job: workers start and compute in spite of them, and they get nothing."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from support.jobs import environment

from hvdtrain.backends import torchrun
from hvdtrain.workers.world import KEY_VARIABLE

KEY = "5e" * 32
SECONDS = 300
ADDRESS_BYTES = 8  # of family, port and IPv4 address, at the beginning of a worker's address
WORKER = """
import horovod.torch as hvd
import torch
hvd.init()
print("the sum is", float(sum(hvd.allreduce(torch.ones(4), op=hvd.Sum, name="ones"))), flush=True)
"""


class Job:
    """Horovod's rendezvous, and workers that are started one after the other."""

    def __init__(self) -> None:
        self.server = torchrun._start_server("127.0.0.1", KEY)
        self._slots = get_host_assignments([HostInfo("localhost", 2)], 2)
        self.server.init(self._slots)
        self._workers: list[subprocess.Popen[str]] = []

    def start(self, rank: int, key: str = KEY) -> "subprocess.Popen[str]":
        variables = create_slot_env_vars(self._slots[rank])
        variables |= create_run_env_vars("127.0.0.1", ["lo"], str(self.server.server_address[1]))
        limits = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "240", "OMP_NUM_THREADS": "1", KEY_VARIABLE: key}
        self._workers.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER],
                env=environment(**variables, **limits),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return self._workers[-1]

    def address_of(self, rank: int) -> tuple[str, int]:
        """Wait until a worker listens for the other one, and return where."""
        deadline = time.monotonic() + SECONDS
        while not (found := self.server.cache.get("global", {}).get(str(rank))):
            assert time.monotonic() < deadline
            assert self._workers[0].poll() is None, self._workers[0].communicate()[0]
            time.sleep(0.05)
        assert int.from_bytes(found[:2], sys.byteorder) == socket.AF_INET
        return socket.inet_ntoa(found[4:ADDRESS_BYTES]), int.from_bytes(found[2:4], "big")

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def job() -> Iterator[Job]:
    one = Job()
    yield one
    one.close()


def test_strangers_who_come_first_do_not_join_and_keep_nobody_out(job):
    first = job.start(0)
    address = job.address_of(0)
    with contextlib.ExitStack() as stack:

        def stranger() -> socket.socket:
            return stack.enter_context(socket.create_connection(address, 60))

        for said in (b"GET / HTTP/1.1\r\n\r\n".ljust(48), os.urandom(48), b"\0" * 5000):
            liar = stranger()
            liar.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert liar.recv(1) == b""  # closed, without an answer
        for _ in range(100):
            stranger()
        slow = stranger()
        slow.sendall(b"slow")
        second = job.start(1)
        outputs = [worker.communicate(timeout=SECONDS)[0] for worker in (first, second)]
    assert [worker.returncode for worker in (first, second)] == [0, 0], outputs
    assert all("the sum is 8.0" in output for output in outputs), outputs


def test_a_worker_without_the_key_is_refused_with_a_message(job):
    worker = job.start(1, key="")
    output = worker.communicate(timeout=SECONDS)[0]
    assert worker.returncode != 0
    assert f"The rendezvous server refused this worker: {KEY_VARIABLE} is missing" in output
    assert job.server.cache == {}
