"""The job's key for workers that torchrun started: torchrun itself gives them no common secret.

On one host, rank 0 hands the key to processes of the same user: the kernel tells both ends of a local socket
who is at the other end. Between hosts it travels through torchrun's store, which is open to everybody who
reaches its port. A key that the user sets in the environment of all hosts is used instead, and not sent.
"""

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.network import receive_exactly
from hvdtrain.host.signed_requests import KEY_VARIABLE

_KEY_BYTES = 32
_SECONDS = 60.0


def offer_key(environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Choose the key, as rank 0.

    Args:
        environ: torchrun's variables; the user's own key may be among them.

    Returns:
        The key, and what the other ranks must be told to get it.
    """
    if key := environ.get(KEY_VARIABLE):
        return key, {}
    key = secrets.token_hex(_KEY_BYTES)
    if environ["GROUP_WORLD_SIZE"] != "1" or not hasattr(socket, "SO_PEERCRED"):
        return key, {"key": key}
    name = f"hvdtrain-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")  # in no file system: nothing is left behind
    listener.listen(128)
    threading.Thread(
        target=_hand_out,
        args=(listener, key, int(environ["LOCAL_WORLD_SIZE"]) - 1),
        daemon=True,
        name="rendezvous-key",
    ).start()
    return key, {"key_socket": name}


def take_key(rank_0: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return the key, as another rank.

    Args:
        rank_0: what rank 0 told through the store.
        environ: the environment of this worker.

    Raises:
        EnvironmentFault: If there is none, another user's process offers it, or the user set another one.
    """
    own = environ.get(KEY_VARIABLE)
    offered = rank_0.get("key") or rank_0.get("key_socket")
    if bool(own) == bool(offered):
        who, other = (f"rank {environ['RANK']}", "rank 0") if own else ("rank 0", f"rank {environ['RANK']}")
        raise EnvironmentFault(
            f"{KEY_VARIABLE} is set for {who} and not for {other}",
            "Set it to the same secret text on every host, or on none.",
        )
    if own:
        return own
    if name := rank_0.get("key_socket"):
        return _ask(str(name))
    if environ["GROUP_WORLD_SIZE"] == "1" and hasattr(socket, "SO_PEERCRED"):
        raise EnvironmentFault(
            "a key of this job is in torchrun's store, where no worker of a job on one host writes it",
            "Somebody else writes to torchrun's store: start again with another --rdzv-id and port.",
        )
    return str(rank_0["key"])


def _hand_out(listener: socket.socket, key: str, takers: int) -> None:
    listener.settimeout(_SECONDS)
    with contextlib.suppress(OSError), listener:
        while takers:
            connection, _ = listener.accept()
            with connection:
                if _peer_user(connection) == os.geteuid():
                    connection.sendall(key.encode())
                    takers -= 1


def _ask(name: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_SECONDS)
        try:
            connection.connect(f"\0{name}")
            if (user := _peer_user(connection)) != (own := os.geteuid()):
                raise EnvironmentFault(
                    f"a process of user {user} offers the key of this job, which belongs to user {own}",
                    "Somebody else writes to torchrun's store: start again with another --rdzv-id and port.",
                )
            return receive_exactly(connection, 2 * _KEY_BYTES).decode("ascii")
        except OSError as error:
            raise EnvironmentFault(
                f"rank 0 does not hand out the key of this job: {error.strerror or error}",
                f"Set {KEY_VARIABLE} to the same secret text for all workers.",
            ) from None


def _peer_user(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a local socket."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)
