"""The patched rendezvous server: requests with the job's key, each taken once, and nothing else."""

import contextlib
import http.client
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvdtrain.workers.world import KEY_VARIABLE, SignedRequests

KEY = "a" * 64
PATH = "/global/0"


class Server:
    """The patched rendezvous server on loopback."""

    def __init__(self, horovod: Callable[[str], Any]) -> None:
        module = horovod("horovod.runner.http.http_server")
        self._server = module.RendezvousServer(key=KEY)
        self.port = self._server.start(address="127.0.0.1")
        self.http: Any = self._server._httpd

    def send(self, method: str, body: bytes = b"", headers: dict[str, str] | None = None, path: str = PATH):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body or None, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def signed(self, client: SignedRequests, method: str, body: bytes = b"", path: str = PATH):
        headers = client.headers(method, path, body)
        status, found, answer = self.send(method, body, headers, path)
        return status, answer, client.is_authentic(status, found, answer), headers

    def stop(self) -> None:
        self._server.stop()
        self.http.server_close()


@pytest.fixture
def server(horovod) -> Iterator[Server]:
    one = Server(horovod)
    yield one
    one.stop()


def client(key: str = KEY) -> SignedRequests:
    return SignedRequests({KEY_VARIABLE: key})


def test_a_worker_with_the_key_puts_and_gets(server):
    worker = client()
    assert server.signed(worker, "PUT", b"address")[:3:2] == (200, True)
    assert server.signed(worker, "GET")[:3] == (200, b"address", True)
    status, _, authentic, _ = server.signed(worker, "GET", path="/global/1")
    assert (status, authentic) == (404, True)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "POST"])
@pytest.mark.parametrize("key", [None, "b" * 64], ids=["no key", "wrong key"])
def test_a_stranger_gets_and_changes_nothing(server, method, key):
    server.signed(client(), "PUT", b"address")
    headers = client(key).headers(method, PATH, b"stranger") if key else {}
    status, _, body = server.send(method, b"stranger" if method == "PUT" else b"", headers)
    assert (status, body) == (403, b"")
    assert server.http.cache == {"global": {"0": b"address"}}
    assert not server.http.finished_list


def test_a_scope_is_cleared_when_all_its_workers_have_finished_whatever_finishes_meanwhile(server):
    server.http.scope_size.update({"local_host": 2, "cross_0": 1})
    worker = client()
    for path in ("/local_host/0", "/local_host/1", "/cross_0/0"):
        server.signed(worker, "PUT", b"address", path)
    for path in ("/local_host/0", "/cross_0/0", "/local_host/1"):
        server.signed(worker, "DELETE", path=path)
    assert not any(server.http.cache.values())


def test_a_request_that_is_sent_again_is_refused(server):
    worker = client()
    old = server.signed(worker, "PUT", b"old")[3]
    server.signed(worker, "PUT", b"new")
    assert server.send("PUT", b"old", old)[0] == 403
    delete = server.signed(worker, "DELETE", path="/ad-hoc/0")[3]
    assert server.send("DELETE", headers=delete, path="/ad-hoc/0")[0] == 403
    get = server.signed(worker, "GET")
    assert get[1] == b"new"
    assert server.send("GET", headers=get[3])[0] == 403


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("DELETE", PATH, b"address"), ("PUT", "/global/1", b"address"), ("PUT", PATH, b"strange")],
)
def test_a_proof_is_worth_nothing_for_another_request(server, method, path, body):
    headers = client().headers("PUT", PATH, b"address")
    assert server.send(method, body, headers, path)[0] in (400, 403)
    assert server.http.cache == {}


def test_a_response_of_another_server_is_not_accepted(server):
    worker = client()
    worker.headers("GET", PATH)
    first = server.signed(worker, "PUT", b"address")
    assert first[2]
    assert not worker.is_authentic(200, {}, b"stranger")
    status, found, _ = server.send("GET", headers=worker.headers("GET", PATH))
    assert worker.is_authentic(status, found, b"address")
    assert not worker.is_authentic(status, found, b"stranger")
    assert not worker.is_authentic(404, found, b"address")


def test_the_launchers_own_client_signs_and_checks_and_strangers_are_reported_once(
    horovod, server, monkeypatch, capfd
):
    kvstore = horovod("horovod.runner.http.http_client")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    kvstore.put_data_into_kvstore("127.0.0.1", server.port, "scope", "key", {"a": 1})
    assert kvstore.read_data_from_kvstore("127.0.0.1", server.port, "scope", "key") == {"a": 1}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed"):
            kvstore.read_data_from_kvstore("127.0.0.1", server.port, "scope", "key", "b" * 64)
    said = capfd.readouterr().err
    assert said.count("127.0.0.1") == 1
    assert "does not have the key of this job" in said


def test_the_key_is_in_the_workers_environment_and_not_in_their_command(horovod, monkeypatch):
    gloo_run = horovod("horovod.runner.gloo_run")
    found: dict[str, Any] = {}

    monkeypatch.setattr(gloo_run, "_exec_command_fn", lambda settings, env: found.update(worker_env=env))
    monkeypatch.setattr(gloo_run, "launch_gloo", lambda *arguments: found.update(arguments=arguments))
    monkeypatch.setattr(gloo_run.driver_service, "start_reports", lambda _: None)

    class Settings:
        key, hosts, num_proc = b"secret", "lo:1", 1

    gloo_run.gloo_run(Settings, ["lo"], {"A": "b"}, "127.0.0.1", ["python"])
    command, _, _, _, env, _, key = found["arguments"]
    assert found["worker_env"] == {"A": "b", KEY_VARIABLE: key}
    assert key not in str((command, env))
    assert key not in gloo_run.get_run_command(["python"], "127.0.0.1", ["lo"], 5)
