"""How agents exchange values: alone, and between the workers of a launcher, without a working Horovod."""

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from hvdtrain.errors import EXIT_ENVIRONMENT, EnvironmentFault
from hvdtrain.host.launcher import launched_rank
from hvdtrain.host.processes import deadline
from hvdtrain.workers.world import SignedRequests

_START_SECONDS = 60.0
_RANK_0_SECONDS = 120.0  # what the other ranks wait for rank 0 in addition to its own time limit
_REQUEST_SECONDS = 10.0


def wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Poll a condition, at growing intervals; return whether it became true in time."""
    until, pause = time.monotonic() + timeout_seconds, 0.01
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(pause * 1.1, 0.1)
    return True


class Transport:
    """Exchange of values between agents, which all take the same steps; this one is of a single agent."""

    title = "this host alone"
    is_stuck = False  # whether the end of the process would wait for Horovod, or for an agent that was late

    def __init__(self, index: int = 0, size: int = 1) -> None:
        self.index, self.size = index, size
        self.answers: dict[str, list[Any]] = {}
        self.stop_waiting = threading.Event()  # set it if there is no time left to wait for other agents

    def allgather(self, step: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Collective. Return the values of all agents in a step, in JSON's types and in the order of indices.

        The value of an agent that does not answer in time is None. Later steps do not wait for this agent.
        """
        self.answers[step] = self._exchange(step, value, timeout_seconds)
        return self.answers[step]

    def _exchange(self, step: str, value: Any, timeout_seconds: float) -> list[Any]:
        return [value]


def open_transport() -> Transport:
    """Collective. Open the transport that fits the launcher; without a launcher, that of a single agent."""
    rank = launched_rank()
    if rank is None:
        return Transport()
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        return RendezvousTransport(rank, int(os.environ.get("HOROVOD_SIZE", "1")))
    return MpiTransport()


class _Rank0Transport(Transport, ABC):
    """Rank 0 collects the values of all agents, and sends them all; it waits for none that was late once."""

    def __init__(self, index: int, size: int) -> None:
        super().__init__(index, size)
        self._live = set(range(size))
        self._number = 0  # of the step

    def _exchange(self, step: str, value: Any, timeout_seconds: float) -> list[Any]:
        self._number += 1
        if self.index:
            self._send(json.dumps(value), [0])
            values = self._receive({0}, timeout_seconds + _RANK_0_SECONDS)
            if 0 not in values:
                raise EnvironmentFault("rank 0 does not answer any more")
            found: list[Any] = values[0]
            return found
        values = {0: value, **self._receive(self._live - {0}, timeout_seconds)}
        self._live &= set(values)
        self.is_stuck = len(self._live) < self.size
        gathered = [values.get(agent) for agent in range(self.size)]
        self._send(json.dumps(gathered), sorted(self._live - {0}))
        return gathered

    def _receive(self, agents: set[int], timeout_seconds: float) -> dict[int, Any]:
        """Return the values of those of the agents that answer in time."""
        values: dict[int, Any] = {}

        def all_received() -> bool:
            texts = {agent: self._received(agent) for agent in sorted(agents - set(values))}
            values.update({agent: json.loads(text) for agent, text in texts.items() if text is not None})
            return len(values) == len(agents) or self.stop_waiting.is_set()

        wait_until(all_received, timeout_seconds)
        return values

    @abstractmethod
    def _send(self, text: str, agents: Iterable[int]) -> None:
        """Send a text to agents, as this agent's one of the step."""

    @abstractmethod
    def _received(self, agent: int) -> str | None:
        """Return the text of an agent in this step if it has arrived, without waiting."""


class RendezvousTransport(_Rank0Transport):
    """The transport over the key-value store that horovodrun runs for Gloo, and closes."""

    title = "Gloo"

    def __init__(self, index: int, size: int) -> None:
        super().__init__(index, size)
        address, port = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        self._url = f"http://{address}:{port}"
        self._signed = SignedRequests()
        self._opener = build_opener(ProxyHandler({}))  # the user's proxy must not be used inside the cluster

    def _send(self, text: str, agents: Iterable[int]) -> None:
        self._request("PUT", self.index, text.encode())

    def _received(self, agent: int) -> str | None:
        return self._request("GET", agent)

    def _request(self, method: str, agent: int, body: bytes | None = None) -> str | None:
        path = f"/hvdtrain-doctor-{self._number}-{agent}/value"
        headers = self._signed.headers(method, path, body or b"")
        request = Request(self._url + path, data=body, method=method, headers=headers)
        try:
            with self._opener.open(request, timeout=_REQUEST_SECONDS) as response:
                answer: bytes = response.read()
                if not self._signed.is_authentic(response.status, response.headers, answer):
                    raise URLError("what answers there does not have the key of this job")
                return answer.decode()
        except OSError as error:
            if isinstance(error, HTTPError):
                error.close()
                if method == "GET" and error.code == 404:
                    return None
            raise EnvironmentFault(
                f"horovodrun cannot be reached at {self._url.split('/')[2]}: "
                f"{getattr(error, 'reason', None) or error}",
                "Allow connections between the hosts on unprivileged ports, or name the interface that leads "
                "to horovodrun's host: --network-interfaces.",
            ) from None


class MpiTransport(_Rank0Transport):
    """The transport over MPI, by mpi4py. It polls, and so never blocks inside MPI."""

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
        self._world = MPI.COMM_WORLD.Dup()
        self._sent: list[tuple[Any, bytes]] = []  # requests with their buffers
        super().__init__(self._world.rank, self._world.size)

    def _send(self, text: str, agents: Iterable[int]) -> None:
        data = text.encode()  # mpi4py would pickle a text, and unpickle whatever comes
        for agent in agents:
            self._sent.append((self._world.Isend([data, self._mpi.BYTE], agent, self._number), data))

    def _received(self, agent: int) -> str | None:
        status = self._mpi.Status()
        if not self._world.Iprobe(agent, self._number, status):
            return None
        data = bytearray(status.Get_count(self._mpi.BYTE))
        self._world.Recv([data, self._mpi.BYTE], agent, self._number)
        return data.decode()


def _exit_on_start_timeout() -> None:
    """End the process: the start of MPI cannot be interrupted."""
    os.write(2, b"hvdtrain doctor: MPI did not start within a minute. The hosts may not reach each other. "
                b"Run python -m hvdtrain doctor --hostfile FILE.\n")  # fmt: skip
    os._exit(EXIT_ENVIRONMENT)
