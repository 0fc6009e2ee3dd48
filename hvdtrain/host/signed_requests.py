"""Signing requests to Horovod's rendezvous server with the job's key, and checking its responses.

The format is that of ``horovod.runner.http.http_auth``, a file of hvdtrain's patches for Horovod. It is
written again here because `doctor` must work without Horovod.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping

KEY_VARIABLE = "HOROVOD_RENDEZVOUS_KEY"

_HEADER = "X-Horovod-Auth"


class SignedRequests:
    """Signs the requests of one client, which sends them one after the other.

    Args:
        environ: holds the job's key. Without one nothing is signed: a Horovod without hvdtrain's patches
            makes no key.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._key = environ.get(KEY_VARIABLE, "").encode()
        self._client = secrets.token_hex(16)
        self._number = 0

    def headers(self, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        """Return the header of the next request; the server takes it once."""
        if not self._key:
            return {}
        self._number += 1
        digest = hashlib.sha256(body).hexdigest()
        identity = f"{self._client} {self._number}"
        return {_HEADER: f"{identity} {digest} {self._proof('request', identity, method, path, digest)}"}

    def is_authentic(self, status: int, headers: Mapping[str, str], body: bytes) -> bool:
        """Return whether a response to the latest request comes from the server of the job."""
        if not self._key:
            return True
        identity = f"{self._client} {self._number}"
        expected = self._proof("response", identity, str(status), hashlib.sha256(body).hexdigest())
        return hmac.compare_digest(headers.get(_HEADER, "").encode(), expected.encode())

    def _proof(self, *parts: str) -> str:
        return hmac.new(self._key, "\n".join(parts).encode(), hashlib.sha256).hexdigest()
