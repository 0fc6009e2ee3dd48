"""An examination under a launcher: exchanges that need no working Horovod."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from hvdtrain.deadline import deadline
from hvdtrain.doctor.exchange import Alone, Exchange, wait_until
from hvdtrain.doctor.speed import SIZES, message_times
from hvdtrain.errors import EXIT_ENVIRONMENT, EnvironmentFault
from hvdtrain.terminal import launched_rank

_START_SECONDS = 60.0
_HUB_SECONDS = 120.0  # what the others wait for rank 0 beyond its own limit
_REQUEST_SECONDS = 10.0
_MESSAGES_SECONDS = 40.0
_MESSAGES_TAG = 30_000  # above all steps
_SCOPE = "hvdtrain-doctor"


def open_exchange() -> Exchange:
    """Collective. Open the exchange that fits the launcher; one of a single member without a launcher.

    Raises:
        EnvironmentFault: where the others cannot be reached.
    """
    rank = launched_rank()
    if rank is None:
        return Alone()
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        return RendezvousExchange(rank, int(os.environ.get("HOROVOD_SIZE", "1")))
    return MpiExchange()


class ThroughRank0:
    """Rank 0 collects what all say, and hands it out; who was too late once is not waited for again."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self.record: dict[str, list[Any]] = {}
        self.hurry = threading.Event()  # set where there is no time left to wait for others
        self._live = set(range(size))
        self._number = 0

    def share(self, step: str, value: Any, seconds: float) -> list[Any]:
        """Collective. Give what all members said; see Exchange."""
        self._number += 1
        values = self._collect(value, seconds) if self.index == 0 else self._report(value, seconds)
        self.record[step] = values
        return values

    @property
    def has_lost(self) -> bool:
        """Whether a member was too late, as far as this one knows."""
        return len(self._live) < self.size

    def time_messages(self, first: int, second: int) -> dict[str, Any] | None:
        """Nothing: the hosts' own connections are timed."""
        return None

    def _collect(self, value: Any, seconds: float) -> list[Any]:
        values: list[Any] = [None] * self.size
        values[0] = value
        missing = self._live - {0}

        def look() -> bool:
            for member, text in self._arrived(missing):
                values[member] = json.loads(text)
                missing.discard(member)
            return not missing or self.hurry.is_set()

        wait_until(look, seconds)
        self._live -= missing
        self._hand_out(json.dumps(values))
        return values

    def _report(self, value: Any, seconds: float) -> list[Any]:
        self._send(json.dumps(value))
        said: list[str] = []

        def look() -> bool:
            said.extend(text for text in [self._handed_out()] if text is not None)
            return bool(said)

        if not wait_until(look, seconds + _HUB_SECONDS):
            raise EnvironmentFault("rank 0 does not answer any more")
        values: list[Any] = json.loads(said[0])
        return values

    def _send(self, text: str) -> None:
        raise NotImplementedError

    def _arrived(self, members: set[int]) -> Iterator[tuple[int, str]]:
        raise NotImplementedError

    def _hand_out(self, text: str) -> None:
        raise NotImplementedError

    def _handed_out(self) -> str | None:
        raise NotImplementedError


class RendezvousExchange(ThroughRank0):
    """Over the store that horovodrun keeps for Gloo."""

    how = "Gloo"

    def __init__(self, index: int, size: int) -> None:
        super().__init__(index, size)
        address, port = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        self._url = f"http://{address}:{port}/{_SCOPE}"
        self._opener = build_opener(ProxyHandler({}))  # a proxy of the user's is not for the cluster

    def close(self) -> None:
        """Do nothing: the store ends with horovodrun."""

    def _send(self, text: str) -> None:
        self._put(f"{self._number}-{self.index}", text)

    def _arrived(self, members: set[int]) -> Iterator[tuple[int, str]]:
        for member in sorted(members):
            text = self._get(f"{self._number}-{member}")
            if text is not None:
                yield member, text

    def _hand_out(self, text: str) -> None:
        self._put(f"{self._number}-all", text)

    def _handed_out(self) -> str | None:
        return self._get(f"{self._number}-all")

    def _put(self, key: str, text: str) -> None:
        request = Request(f"{self._url}-{key}/value", data=text.encode(), method="PUT")
        with self._reaching(), self._opener.open(request, timeout=_REQUEST_SECONDS):
            pass

    def _get(self, key: str) -> str | None:
        with self._reaching():
            try:
                with self._opener.open(f"{self._url}-{key}/value", timeout=_REQUEST_SECONDS) as answer:
                    text: str = answer.read().decode()
                    return text
            except HTTPError as error:
                error.close()
                if error.code == 404:
                    return None
                raise
        return None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise EnvironmentFault(
                f"horovodrun cannot be reached at {self._url.split('/')[2]}: {reason}",
                "Let hosts reach each other on unprivileged ports, or name the interface that leads to "
                "horovodrun's host: --network-interfaces.",
            ) from None


class MpiExchange(ThroughRank0):
    """Over MPI, by mpi4py; waiting never blocks in MPI.

    Raises:
        EnvironmentFault: where mpi4py cannot be loaded.
    """

    how = "MPI"

    def __init__(self) -> None:
        try:
            with deadline(_START_SECONDS, _give_up_start):
                from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise EnvironmentFault(
                f"mpi4py cannot be loaded: {error}",
                "Install it in this host's environment, for the same MPI: pip install mpi4py. Or start "
                "with horovodrun --gloo.",
            ) from None
        self._mpi = MPI
        self.world = MPI.COMM_WORLD.Dup()
        self._sent: list[Any] = []  # requests, which hold their buffers
        super().__init__(self.world.rank, self.world.size)

    def time_messages(self, first: int, second: int) -> dict[str, Any] | None:
        """Collective of two members. Time messages by MPI, in a thread: MPI may never come back."""
        outcome: dict[str, Any] = {}
        part = {first: self._send_messages, second: self._answer_messages}[self.index]
        thread = threading.Thread(target=part, args=(first, second, outcome), daemon=True)
        thread.start()
        if not wait_until(lambda: not thread.is_alive(), _MESSAGES_SECONDS):
            return {"error": f"MPI did not get them through in {_MESSAGES_SECONDS:.0f} s"}
        return outcome

    def _send_messages(self, first: int, second: int, outcome: dict[str, Any]) -> None:
        answer = bytearray(1)

        def send(message: memoryview) -> None:
            self.world.Send([message, self._mpi.BYTE], second, _MESSAGES_TAG)
            self.world.Recv([answer, self._mpi.BYTE], second, _MESSAGES_TAG)

        times = message_times(send)
        self.world.Send([bytearray(0), self._mpi.BYTE], second, _MESSAGES_TAG)
        outcome.update(times, used="MPI")

    def _answer_messages(self, first: int, second: int, outcome: dict[str, Any]) -> None:
        buffer, status = bytearray(SIZES[-1]), self._mpi.Status()
        while True:
            self.world.Recv([buffer, self._mpi.BYTE], first, _MESSAGES_TAG, status)
            if not status.Get_count(self._mpi.BYTE):
                return
            self.world.Send([bytearray(1), self._mpi.BYTE], first, _MESSAGES_TAG)

    def close(self) -> None:
        """Leave without waiting for members that are lost."""
        with contextlib.suppress(Exception):
            for request in self._sent:
                request.test()

    def _send(self, text: str) -> None:
        self._sent.append(self.world.isend(text, 0, self._number))

    def _arrived(self, members: set[int]) -> Iterator[tuple[int, str]]:
        for member in sorted(members):
            if self.world.iprobe(member, self._number):
                yield member, self.world.recv(source=member, tag=self._number)

    def _hand_out(self, text: str) -> None:
        for member in sorted(self._live - {0}):
            self._sent.append(self.world.isend(text, member, self._number))

    def _handed_out(self) -> str | None:
        if not self.world.iprobe(0, self._number):
            return None
        text: str = self.world.recv(source=0, tag=self._number)
        return text


def _give_up_start() -> None:
    """End the process: the start of MPI cannot be given up from inside."""
    os.write(2, b"hvdtrain doctor: MPI did not start within a minute: do all hosts reach each other? "
                b"Run python -m hvdtrain doctor --hostfile FILE.\n")  # fmt: skip
    os._exit(EXIT_ENVIRONMENT)
