"""A server of S3 on this host, with the faults that a test sets between it and its clients."""

import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

_LOOK_SECONDS = 0.02


class Faults:
    """Serves an application of WSGI with the faults that a test sets; all can be changed at any time.

    Attributes:
        cut_after_sent_bytes: how many bytes of a request are read before its connection is cut; None all.
        cut_after_answered_bytes: likewise of answers.
        cuts_left: how many connections are cut.
        failures_left: how many of the next requests are answered with 503.
        refused: writes whose path has these words in it are answered with 403, as a full bucket may do.
        delay_seconds: how long each request waits.
        is_down: whether connections are refused; requests that are open are cut.
        is_frozen: whether nothing is answered; connections stay open until it ends, and are cut then.
    """

    def __init__(self, application) -> None:
        self._application, self._lock, self._ended = application, threading.Lock(), False
        self._server = None
        self.port = 0
        self.heal()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_down(self) -> bool:
        return self._server is None

    @is_down.setter
    def is_down(self, value: bool) -> None:
        if value == self.is_down:
            return
        if value:
            server, self._server = self._server, None
            server.server_close()
        else:
            self._server = _listening(self.port, self)
            self.port = self._server.server_port

    def heal(self) -> None:
        """Take back all faults."""
        self.cut_after_sent_bytes = self.cut_after_answered_bytes = None
        self.cuts_left = self.failures_left = 0
        self.refused, self.delay_seconds, self.is_frozen, self.is_down = "", 0.0, False, False

    def stop(self) -> None:
        self._ended = self.is_down = True
        self._thread.join(timeout=30)

    def _serve(self) -> None:
        while not self._ended:
            if (server := self._server) is None:
                time.sleep(_LOOK_SECONDS)
                continue
            with suppress(OSError, ValueError):  # it goes down meanwhile
                server.handle_request()

    def __call__(self, environ, start_response):
        """Answer a request; a cut ends its connection, as the end of a server does."""
        time.sleep(self.delay_seconds)
        was_frozen = self.is_frozen
        while self.is_frozen and not self.is_down:
            time.sleep(_LOOK_SECONDS)
        if was_frozen or self.is_down:
            return _cut(environ, [])
        size, content = int(environ.get("CONTENT_LENGTH") or 0), environ["wsgi.input"]
        if size > (self.cut_after_sent_bytes or size) and self._takes("cuts_left"):
            content.read(self.cut_after_sent_bytes)
            return _cut(environ, [])
        is_refused = self.refused and self.refused in environ["PATH_INFO"]
        if is_refused and environ["REQUEST_METHOD"] in ("PUT", "POST"):
            return _failure(environ, start_response, "403 Forbidden", "QuotaExceeded")
        if self._takes("failures_left"):
            return _failure(environ, start_response, "503 Busy", "ServiceUnavailable")
        answer, most = b"".join(self._application(environ, start_response)), self.cut_after_answered_bytes
        if len(answer) > (most or len(answer)) and self._takes("cuts_left"):
            return _cut(environ, [answer[:most]])
        return [answer]

    def _takes(self, name: str) -> bool:
        """Count a fault; return whether there is one left."""
        with self._lock:
            left = getattr(self, name)
            setattr(self, name, max(0, left - 1))
            return left > 0


def _listening(port: int, application):
    """Return a server on loopback that listens and writes no log."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        def log(self, *_) -> None:
            pass

    server = make_server("127.0.0.1", port, application, threaded=True, request_handler=Silent)
    server.timeout = _LOOK_SECONDS
    return server


def _failure(environ, start_response, status: str, code: str) -> list[bytes]:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # without a limit it waits for more
    start_response(status, [("Content-Type", "application/xml")])
    return [f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>busy</Message></Error>".encode()]


def _cut(environ, parts: list[bytes]):
    """Yield the beginning of an answer, then end the connection."""
    yield from parts
    with suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


class ObjectStore:
    """A server of S3 with a bucket: clients with ``environ`` meet the faults of ``proxy``, its own do not."""

    def __init__(self, bucket: str) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        application = DomainDispatcherApplication(create_backend_app)
        self.bucket, self.proxy, self._direct = bucket, Faults(application), Faults(application)
        self.environ = credentials(self.proxy.endpoint)
        self.client().create_bucket(Bucket=bucket)

    def client(self):
        """Return boto3's client of this server, which meets no faults."""
        import boto3

        names = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self._direct.endpoint, **names)

    def stop(self) -> None:
        self.proxy.stop()
        self._direct.stop()

    def url(self, *names: str) -> str:
        """Return the URL of what has these names in the bucket."""
        return "/".join([f"s3://{self.bucket}", *names])

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Return the bucket's objects by key, as they are now."""
        client, objects = self.client(), {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
            for key in (found["Key"] for found in page.get("Contents", [])):
                with suppress(client.exceptions.NoSuchKey):  # it was removed meanwhile
                    objects[key] = client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        client.close()
        return objects

    def remove(self, key: str) -> None:
        self.client().delete_object(Bucket=self.bucket, Key=key)

    def put(self, key: str, content: bytes) -> None:
        """Put an object into the bucket."""
        self.client().put_object(Bucket=self.bucket, Key=key, Body=content)

    def put_folder(self, folder: Path, prefix: str) -> None:
        """Put the files of a folder into the bucket."""
        client = self.client()
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
    """Return a context with a server and a bucket."""
    store = ObjectStore(bucket)
    try:
        yield store
    finally:
        store.stop()


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
