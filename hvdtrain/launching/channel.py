"""How a function goes to the workers that are launched for it, and how results and errors come back.

The launching process serves both over HTTP, by Horovod's key-value store of its launcher. Each request and
each response carries a proof by a key of 256 random bits that is made for the launch, so that nothing is
unpickled that does not come from a process with the key.
"""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from socket import create_connection
from threading import Thread
from typing import Any

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.hostfile import own_addresses

ADDRESS_VARIABLE = "HVDTRAIN_LAUNCH_ADDRESS"  # "10.0.0.1,10.1.0.1:4567", of the process that launched
KEY_VARIABLE = "HVDTRAIN_LAUNCH_KEY"

_FUNCTION, _RESULTS, _ERRORS = "function", "results", "errors"
_SECONDS = 600  # in which a function, or a result, has arrived
_CONNECT_SECONDS = 3  # for each address of the process that launched
_REMEDY = "Can this host reach the one that launched? `python -m hvdtrain doctor -H HOSTS` tells."


class Channel:
    """The end of the launching process.

    Args:
        function: what every worker gets.
        is_local: whether all workers are on this host; then nobody else can connect.

    Attributes:
        environ: what workers need to reach it; secret.
    """

    def __init__(self, function: Mapping[str, Any], is_local: bool) -> None:
        from horovod.runner.common.util import codec
        from horovod.runner.http.http_server import KVStoreHTTPServer

        key = secrets.token_hex(32)
        self._loads = codec.loads_base64
        self._server = KVStoreHTTPServer(("127.0.0.1" if is_local else "", 0), _handler(), 0, key)
        self._server.cache[_FUNCTION] = {"0": codec.dumps_base64(dict(function), to_ascii=False)}
        addresses = ["127.0.0.1"] if is_local else _addresses()
        place = f"{','.join(addresses)}:{self._server.server_address[1]}"
        self.environ = {ADDRESS_VARIABLE: place, KEY_VARIABLE: key}
        self._thread = Thread(target=self._server.serve_forever, name="hvdtrain launch", daemon=True)
        self._thread.start()

    def result(self) -> tuple[bool, Any]:
        """Return whether rank 0 has sent a result, and the result."""
        found = self._received(_RESULTS).get("0")
        return (False, None) if found is None else (True, self._loads(found))

    def errors(self) -> list[dict[str, Any]]:
        """Return the errors of workers, the first first."""
        return [self._loads(body) for body in self._received(_ERRORS).values()]

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _received(self, scope: str) -> dict[str, bytes]:
        with self._server.cache_lock:
            return dict(self._server.cache.get(scope, {}))


def _handler() -> type:
    """Return what answers requests: as Horovod does, with more time for those that have the key.

    Horovod's few seconds are for short messages, and keep strangers from occupying the server.
    """
    from horovod.runner.http.http_server import KVStoreHandler

    class Handler(KVStoreHandler):
        def parse_request(self) -> bool:
            has_key: bool = super().parse_request()
            if has_key:
                self.connection.settimeout(_SECONDS)
                with self.server._connections_lock:
                    self.server._connections.pop(self.request, None)
            return has_key

    return Handler


@contextmanager
def opened(function: Mapping[str, Any], is_local: bool) -> Iterator[Channel]:
    """Return a context with the end of the launching process."""
    channel = Channel(function, is_local)
    try:
        yield channel
    finally:
        channel.close()


class WorkerEnd:
    """The end of a worker, which takes place and key from its environment.

    Args:
        rank: this worker's.

    Raises:
        EnvironmentFault: If the process that launched cannot be reached.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        hosts, _, port = os.environ.pop(ADDRESS_VARIABLE).rpartition(":")
        self._key = os.environ.pop(KEY_VARIABLE)
        self._port = int(port)
        self._host, self.function = self._reach(hosts.split(","))

    def send_result(self, result: Any) -> None:
        """Send what the function returned."""
        self._put(_RESULTS, result)

    def send_error(self, error: Mapping[str, Any]) -> None:
        """Send what the function raised."""
        self._put(_ERRORS, dict(error))

    def _reach(self, hosts: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """Return the address of the process that launched, and what it gives."""
        from horovod.runner.http.http_client import read_data_from_kvstore

        problem: Exception | None = None
        for host in hosts:
            try:
                create_connection((host, self._port), _CONNECT_SECONDS).close()
                with _without_proxy():
                    return host, read_data_from_kvstore(host, self._port, _FUNCTION, "0", self._key)
            except (OSError, RuntimeError, HTTPException) as error:
                problem = error
        raise EnvironmentFault(
            f"cannot get the function from {', '.join(hosts)}, port {self._port}: {problem}", _REMEDY
        )

    def _put(self, scope: str, value: Any) -> None:
        from horovod.runner.http.http_client import put_data_into_kvstore

        try:
            with _without_proxy():
                put_data_into_kvstore(self._host, self._port, scope, str(self._rank), value, self._key)
        except HTTPException as error:
            raise EnvironmentFault(
                f"cannot send to {self._host}, port {self._port}: {type(error).__name__}: {error}", _REMEDY
            ) from error


@contextmanager
def _without_proxy() -> Iterator[None]:
    """Return a context in which requests go straight to their host, whatever proxy the environment names."""
    before = os.environ.get("no_proxy")
    os.environ["no_proxy"] = "*"
    try:
        yield
    finally:
        os.environ.pop("no_proxy")
        if before is not None:
            os.environ["no_proxy"] = before


def _addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one, and at last its own."""
    found = [text.partition("/")[0] for texts in own_addresses().values() for text in texts]
    return [*found, "127.0.0.1"]
