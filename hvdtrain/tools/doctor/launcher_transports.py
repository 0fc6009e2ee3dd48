"""The transports between the workers of a launcher. They do not need a working Horovod."""

import contextlib
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from hvdtrain.errors import EXIT_ENVIRONMENT, EnvironmentFault
from hvdtrain.host.launcher import launched_rank
from hvdtrain.host.processes import deadline
from hvdtrain.tools.doctor.collect import LocalTransport, Transport, wait_until
from hvdtrain.tools.doctor.speed import SIZES, message_times
from hvdtrain.workers.world import SignedRequests

_START_SECONDS = 60.0
_RANK_0_SECONDS = 120.0  # what the other ranks wait for rank 0 in addition to its own time limit
_REQUEST_SECONDS = 10.0
_MESSAGES_SECONDS = 40.0
_MESSAGES_TAG = 30_000  # above the numbers of all steps
_SCOPE = "hvdtrain-doctor"


def open_transport() -> Transport:
    """Collective. Open the transport that fits the launcher; without a launcher, that of a single agent.

    Raises:
        EnvironmentFault: If the other workers cannot be reached.
    """
    rank = launched_rank()
    if rank is None:
        return LocalTransport()
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        return RendezvousTransport(rank, int(os.environ.get("HOROVOD_SIZE", "1")))
    return MpiTransport()


class Rank0Transport(ABC):
    """A transport in which rank 0 collects the values of all agents, and sends them the whole list.

    An agent that was late once is not waited for again.

    Attributes:
        stop_waiting: set it if there is no time left to wait for other agents.
    """

    title: str

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self.answers: dict[str, list[Any]] = {}
        self.stop_waiting = threading.Event()
        self._live = set(range(size))
        self._step_number = 0

    def allgather(self, step: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Collective. Return the values of all agents; see Transport."""
        self._step_number += 1
        on_step = self._collect if self.index == 0 else self._report
        self.answers[step] = on_step(value, timeout_seconds)
        return self.answers[step]

    @property
    def has_lost_agents(self) -> bool:
        """Whether an agent was late; known to rank 0 only."""
        return len(self._live) < self.size

    def time_messages(self, first: int, second: int) -> dict[str, Any] | None:
        """Return None: this transport cannot send messages between two agents."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Leave the transport, without waiting for other agents."""

    def _collect(self, value: Any, timeout_seconds: float) -> list[Any]:
        values: list[Any] = [None] * self.size
        values[0] = value
        missing = self._live - {0}

        def all_received() -> bool:
            for agent, text in self._received_values(missing):
                values[agent] = json.loads(text)
                missing.discard(agent)
            return not missing or self.stop_waiting.is_set()

        wait_until(all_received, timeout_seconds)
        self._live -= missing
        self._send_list(json.dumps(values))
        return values

    def _report(self, value: Any, timeout_seconds: float) -> list[Any]:
        self._send_value(json.dumps(value))
        received: list[str] = []

        def list_received() -> bool:
            text = self._received_list()
            received.extend([] if text is None else [text])
            return bool(received)

        if not wait_until(list_received, timeout_seconds + _RANK_0_SECONDS):
            raise EnvironmentFault("rank 0 does not answer any more")
        values: list[Any] = json.loads(received[0])
        return values

    @abstractmethod
    def _send_value(self, text: str) -> None:
        """Send this agent's value to rank 0."""

    @abstractmethod
    def _received_values(self, agents: set[int]) -> Iterator[tuple[int, str]]:
        """Yield the values that have arrived at rank 0 from the given agents, without waiting."""

    @abstractmethod
    def _send_list(self, text: str) -> None:
        """Send the list of all values from rank 0 to the other agents."""

    @abstractmethod
    def _received_list(self) -> str | None:
        """Return the list if it has arrived from rank 0, without waiting."""


class RendezvousTransport(Rank0Transport):
    """The transport over the key-value store that horovodrun runs for Gloo."""

    title = "Gloo"

    def __init__(self, index: int, size: int) -> None:
        super().__init__(index, size)
        address, port = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        self._url = f"http://{address}:{port}"
        self._signed = SignedRequests()
        self._opener = build_opener(ProxyHandler({}))  # the user's proxy must not be used inside the cluster

    def close(self) -> None:
        """Do nothing: horovodrun closes the store."""

    def _send_value(self, text: str) -> None:
        self._put(f"{self._step_number}-{self.index}", text)

    def _received_values(self, agents: set[int]) -> Iterator[tuple[int, str]]:
        for agent in sorted(agents):
            text = self._get(f"{self._step_number}-{agent}")
            if text is not None:
                yield agent, text

    def _send_list(self, text: str) -> None:
        self._put(f"{self._step_number}-all", text)

    def _received_list(self) -> str | None:
        return self._get(f"{self._step_number}-all")

    def _put(self, key: str, text: str) -> None:
        with self._reporting_errors():
            self._request("PUT", key, text.encode())

    def _get(self, key: str) -> str | None:
        with self._reporting_errors():
            try:
                return self._request("GET", key).decode()
            except HTTPError as error:
                error.close()
                if error.code == 404:
                    return None
                raise
        return None

    def _request(self, method: str, key: str, body: bytes | None = None) -> bytes:
        path = f"/{_SCOPE}-{key}/value"
        headers = self._signed.headers(method, path, body or b"")
        request = Request(self._url + path, data=body, method=method, headers=headers)
        with self._opener.open(request, timeout=_REQUEST_SECONDS) as response:
            answer: bytes = response.read()
            if not self._signed.is_authentic(response.status, response.headers, answer):
                raise URLError("what answers there does not have the key of this job")
        return answer

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        try:
            yield
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise EnvironmentFault(
                f"horovodrun cannot be reached at {self._url.split('/')[2]}: {reason}",
                "Allow connections between the hosts on unprivileged ports, or name the interface that leads "
                "to horovodrun's host: --network-interfaces.",
            ) from None


class MpiTransport(Rank0Transport):
    """The transport over MPI, by mpi4py. It polls, and so never blocks inside MPI.

    Raises:
        EnvironmentFault: If mpi4py cannot be loaded.
    """

    title = "MPI"

    def __init__(self) -> None:
        try:
            with deadline(_START_SECONDS, _exit_on_start_timeout):
                from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise EnvironmentFault(
                f"mpi4py cannot be loaded: {error}",
                "Install it in this host's environment, for the same MPI: pip install mpi4py. Or use Gloo: "
                "horovodrun --gloo.",
            ) from None
        self._mpi = MPI
        self.world = MPI.COMM_WORLD.Dup()
        self._sent: list[tuple[Any, bytes]] = []  # requests with their buffers
        super().__init__(self.world.rank, self.world.size)

    def time_messages(self, first: int, second: int) -> dict[str, Any] | None:
        """Collective, for two agents. Time messages over MPI, in a thread: an MPI call may never return."""
        result: dict[str, Any] = {}
        target = {first: self._send_messages, second: self._acknowledge_messages}[self.index]
        thread = threading.Thread(target=target, args=(first, second, result), daemon=True)
        thread.start()
        if not wait_until(lambda: not thread.is_alive(), _MESSAGES_SECONDS):
            return {"error": f"MPI did not transfer them within {_MESSAGES_SECONDS:.0f} s"}
        return result

    def _send_messages(self, first: int, second: int, result: dict[str, Any]) -> None:
        acknowledgement = bytearray(1)

        def send(message: memoryview) -> None:
            self.world.Send([message, self._mpi.BYTE], second, _MESSAGES_TAG)
            self.world.Recv([acknowledgement, self._mpi.BYTE], second, _MESSAGES_TAG)

        times = message_times(send)
        self.world.Send([bytearray(0), self._mpi.BYTE], second, _MESSAGES_TAG)
        result.update(times, used="MPI")

    def _acknowledge_messages(self, first: int, second: int, result: dict[str, Any]) -> None:
        buffer, status = bytearray(SIZES[-1]), self._mpi.Status()
        while True:
            self.world.Recv([buffer, self._mpi.BYTE], first, _MESSAGES_TAG, status)
            if not status.Get_count(self._mpi.BYTE):
                return
            self.world.Send([bytearray(1), self._mpi.BYTE], first, _MESSAGES_TAG)

    def close(self) -> None:
        """Leave, without waiting for agents that were lost."""
        with contextlib.suppress(Exception):
            for request, _ in self._sent:
                request.Test()

    def _send_value(self, text: str) -> None:
        self._send(text, 0)

    def _received_values(self, agents: set[int]) -> Iterator[tuple[int, str]]:
        for agent in sorted(agents):
            text = self._received(agent)
            if text is not None:
                yield agent, text

    def _send_list(self, text: str) -> None:
        for agent in sorted(self._live - {0}):
            self._send(text, agent)

    def _received_list(self) -> str | None:
        return self._received(0)

    def _send(self, text: str, agent: int) -> None:
        data = text.encode()  # mpi4py would pickle a text, and unpickle whatever comes
        self._sent.append((self.world.Isend([data, self._mpi.BYTE], agent, self._step_number), data))

    def _received(self, agent: int) -> str | None:
        status = self._mpi.Status()
        if not self.world.Iprobe(agent, self._step_number, status):
            return None
        data = bytearray(status.Get_count(self._mpi.BYTE))
        self.world.Recv([data, self._mpi.BYTE], agent, self._step_number)
        return data.decode()


def _exit_on_start_timeout() -> None:
    """End the process: the start of MPI cannot be interrupted."""
    os.write(2, b"hvdtrain doctor: MPI did not start within a minute. The hosts may not reach each other. "
                b"Run python -m hvdtrain doctor --hostfile FILE.\n")  # fmt: skip
    os._exit(EXIT_ENVIRONMENT)
