"""The rendezvous of a world: it answers only its workers, waits for keys, and ends at once."""

import http.client
import socket
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

pytest.importorskip("horovod.runner.http.http_auth", reason="Horovod is not installed")

from horovod.runner.http import http_auth

from hvdtrain.elastic.driver import clusters as stores
from hvdtrain.elastic.driver.clusters import WorldStore

KEY = "a" * 64


@pytest.fixture
def store():
    store = WorldStore(KEY, ["127.0.0.1"])
    yield store
    store.close()


class Worker:
    """Requests of one worker, each on a connection of its own, as Horovod's are."""

    def __init__(self, store: WorldStore, key: str = KEY) -> None:
        self._address = ("127.0.0.1", store.port)
        self._signed = http_auth.SignedRequests(key)

    def __call__(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self._address, timeout=90)
        try:
            connection.request(method, path, body or None, self._signed.headers(method, path, body))
            response = connection.getresponse()
            answer = response.read()
            if response.status != 403:
                self._signed.check(response.status, response.headers, answer)
            return response.status, answer
        finally:
            connection.close()


def test_a_value_is_there_for_the_others_and_stays_after_a_worker_is_done(store):
    one, other = Worker(store), Worker(store)
    assert one("PUT", "/global/0", b"address") == (200, b"")
    assert one("DELETE", "/global/0") == (200, b"")  # the other has not read it yet
    assert other("GET", "/global/0") == (200, b"address")


def test_a_key_that_is_missing_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(stores, "_LONG_POLL_SECONDS", 60)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(Worker(store), "GET", "/global/1")
        time.sleep(0.2)
        assert not answer.done()
        Worker(store)("PUT", "/global/1", b"x")
        assert answer.result(20) == (200, b"x")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_who_has_the_key_of_another_world_is_refused(store, method):
    stranger = Worker(store, "b" * 64)
    assert stranger(method, "/global/0", b"x" * (method == "PUT")) == (403, b"")


def test_its_end_ends_who_waits_and_nobody_can_connect(store, monkeypatch):
    monkeypatch.setattr(stores, "_LONG_POLL_SECONDS", 60)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(Worker(store), "GET", "/global/1") for _ in range(4)]
        time.sleep(0.2)
        since = time.monotonic()
        store.close()
        wait(answers, 30)
        assert time.monotonic() - since < 30
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=60)
