"""A real server of S3 on this host, in a process of its own, and a proxy before it that makes faults."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from support.jobs import environment

_PIECE_BYTES = 1 << 16
_LOOK_SECONDS = 0.02
_SERVER = """
import sys
from moto.moto_server.werkzeug_app import create_backend_app, DomainDispatcherApplication
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


class S3Server:
    """A server that holds its objects in memory: they are lost when it ends, not when the proxy is down."""

    def __init__(self) -> None:
        words = [sys.executable, "-c", _SERVER]
        self._process = subprocess.Popen(
            words,
            env={**environment(), **credentials("")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server did not start"
        self.port = int(line)
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def client(self):
        """Return boto3's client of this server, past the proxy."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(retries={"total_max_attempts": 3}, read_timeout=60),
        )


class FaultProxy:
    """Passes connections on to a server, with the faults that a test sets; all can be changed at any time.

    Attributes:
        cut_after_sent_bytes: how many bytes of requests a connection passes on before it is cut; None all.
        cut_after_answered_bytes: likewise of answers.
        cuts_left: how many connections are cut; None all of them.
        failures_left: how many of the next requests are answered with 503 and not passed on.
        refused: writes whose path has these bytes in it are answered with 403, as a full bucket may do.
        delay_seconds: how long each piece of up to 64 KB waits, in both directions.
        is_down: whether connections are refused; those that are open are cut.
        is_frozen: whether nothing is passed on; connections stay open.
        cuts: how many connections were cut so far.
    """

    def __init__(self, port: int) -> None:
        self.cut_after_sent_bytes: int | None = None
        self.cut_after_answered_bytes: int | None = None
        self.cuts_left: int | None = None
        self.failures_left = 0
        self.refused = b""
        self.delay_seconds = 0.0
        self.is_frozen = False
        self.cuts = 0
        self._server_port = port
        self._is_down = False
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._start(self._accept)

    @property
    def is_down(self) -> bool:
        return self._is_down

    @is_down.setter
    def is_down(self, value: bool) -> None:
        if value == self._is_down:
            return
        self._is_down = value
        if value:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
            self._listener.close()
            self.cut_all()
        else:
            self._listener = socket.create_server(("127.0.0.1", self.port))

    def heal(self) -> None:
        """Take back all faults; connections that are open are cut, as what they passed on counts."""
        self.cut_after_sent_bytes = self.cut_after_answered_bytes = self.cuts_left = None
        self.failures_left, self.delay_seconds, self.is_frozen, self.is_down = 0, 0.0, False, False
        self.refused = b""
        self.cut_all()

    def cut_all(self) -> None:
        with self._lock:
            sockets = list(self._open)
        for one in sockets:
            _cut(one)

    def stop(self) -> None:
        """End it, with its threads."""
        self._ends.set()
        self.is_down = True
        for thread in self._threads:
            thread.join(timeout=30)

    def _start(self, target, *arguments) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True, name="proxy")
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        """Take connections; one thread does it as long as the proxy is there."""
        while not self._ends.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                self._ends.wait(_LOOK_SECONDS)  # it is down
                continue
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self._open.add(client)
        with ExitStack() as stack:
            stack.callback(self._forget, client)
            if self._is_down:
                return
            server = stack.enter_context(socket.create_connection(("127.0.0.1", self._server_port)))
            back = threading.Thread(target=self._pass_on, args=(server, client, False), daemon=True)
            back.start()
            self._pass_on(client, server, True)
            back.join()

    def _forget(self, client: socket.socket) -> None:
        with self._lock:
            self._open.discard(client)
        _cut(client)
        client.close()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        """Pass on the bytes of one direction until it ends; a cut ends both."""
        passed = 0
        try:
            while piece := source.recv(_PIECE_BYTES):
                if is_request and _is_start(piece) and self._takes_failure():
                    _answer_failure(source, 503, b"ServiceUnavailable")
                    break
                if is_request and self.refused and self.refused in _written_path(piece):
                    _answer_failure(source, 403, b"QuotaExceeded")
                    break
                self._wait()
                if self._ends.is_set():
                    break
                limit = self.cut_after_sent_bytes if is_request else self.cut_after_answered_bytes
                if limit is not None and passed + len(piece) > limit and self._takes_cut():
                    sink.sendall(piece[: max(0, limit - passed)])
                    break
                sink.sendall(piece)
                passed += len(piece)
        except OSError:
            pass
        _cut(source)
        _cut(sink)

    def _wait(self) -> None:
        self._ends.wait(self.delay_seconds)
        while self.is_frozen and not self._is_down and not self._ends.is_set():
            time.sleep(_LOOK_SECONDS)

    def _takes_cut(self) -> bool:
        with self._lock:
            if self.cuts_left == 0:
                return False
            if self.cuts_left is not None:
                self.cuts_left -= 1
            self.cuts += 1
            return True

    def _takes_failure(self) -> bool:
        with self._lock:
            if self.failures_left <= 0:
                return False
            self.failures_left -= 1
            return True


class ObjectStore:
    """A server of S3 with a bucket, and a proxy before it, which clients with ``environ`` go through."""

    def __init__(self, server: S3Server, proxy: FaultProxy, bucket: str) -> None:
        self.server, self.proxy, self.bucket = server, proxy, bucket
        self.environ = credentials(proxy.endpoint)

    def url(self, *names: str) -> str:
        """Return the URL of what has these names in the bucket."""
        return "/".join([f"s3://{self.bucket}", *names])

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Return the bucket's objects by key, as they are now, past the proxy."""
        client, objects = self.server.client(), {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
            for key in (found["Key"] for found in page.get("Contents", [])):
                with suppress(client.exceptions.NoSuchKey):  # it was removed meanwhile
                    objects[key] = client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        client.close()
        return objects

    def remove(self, key: str) -> None:
        self.server.client().delete_object(Bucket=self.bucket, Key=key)

    def put(self, key: str, content: bytes) -> None:
        """Put an object into the bucket, past the proxy."""
        self.server.client().put_object(Bucket=self.bucket, Key=key, Body=content)

    def put_folder(self, folder: Path, prefix: str) -> None:
        """Put the files of a folder into the bucket."""
        client = self.server.client()
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder)}"
                client.put_object(Bucket=self.bucket, Key=key, Body=path.read_bytes())
        client.close()


def credentials(endpoint: str) -> dict[str, str]:
    """Return the environment of a client of the server, with files of credentials that are not there."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextmanager
def object_store(bucket: str = "bucket"):
    """Return a context with a server, a bucket and a proxy."""
    with ExitStack() as stack:
        server = S3Server()
        stack.callback(server.stop)
        proxy = FaultProxy(server.port)
        stack.callback(proxy.stop)
        client = server.client()
        client.create_bucket(Bucket=bucket)
        client.close()
        yield ObjectStore(server, proxy, bucket)


@contextmanager
def client_environment(store: ObjectStore):
    """Return a context in which clients in this process use the store."""
    import fsspec

    changes, system = store.environ, fsspec.get_filesystem_class("s3")
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    system.clear_instance_cache()  # they are kept by arguments, which do not name the server
    try:
        yield store
    finally:
        system.clear_instance_cache()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _is_start(piece: bytes) -> bool:
    """Return whether a request begins here: clients send its head in one piece, or more at once."""
    return piece.split(b" ", 1)[0] in (b"GET", b"PUT", b"POST", b"HEAD", b"DELETE")


def _written_path(piece: bytes) -> bytes:
    """Return the path that a request writes which begins here; nothing of other requests."""
    method, _, rest = piece.partition(b" ")
    return rest.partition(b" ")[0] if method in (b"PUT", b"POST") else b""


def _answer_failure(client: socket.socket, status: int, code: bytes) -> None:
    body = b"<?xml version='1.0'?><Error><Code>%b</Code><Message>busy</Message></Error>" % code
    head = f"HTTP/1.1 {status} Busy\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    client.shutdown(socket.SHUT_WR)
    client.settimeout(5)
    with suppress(OSError):  # what is left of the request, so that the answer is not reset away
        while client.recv(_PIECE_BYTES):
            pass


def _cut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
