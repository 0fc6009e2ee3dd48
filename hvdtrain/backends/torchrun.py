"""Workers that torchrun started: Horovod's variables, agreed on through torchrun's own store.

Horovod over Gloo needs the rank, size and host of each worker, and a rendezvous server, as horovodrun gives
them. torchrun states ranks and sizes, and runs a key-value store. Rank 0 runs the server, in a thread.
"""

import contextlib
import inspect
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.hostfile import interfaces, receive_exactly
from hvdtrain.host.processes import end_with_parent
from hvdtrain.workers.world import KEY_VARIABLE

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


_STORE_SECONDS = 60
_CONNECT_SECONDS = 10

# Runs in a process of its own, so that PyTorch is not loaded beside TensorFlow: the two may bring different
# versions of the same native libraries. Prints a JSON list with the text of each rank.
_EXCHANGE = """
import json, sys
from datetime import timedelta
from torch.distributed import rendezvous
prefix, seconds = sys.argv[1:]
text = sys.stdin.read()
store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=float(seconds))))
store.set(f"{prefix}/{rank}", text)
texts = [store.get(f"{prefix}/{other}").decode() for other in range(size)]
print(json.dumps(texts))
"""


def join_torchrun(environ: MutableMapping[str, str] = os.environ) -> None:
    """Collective. Let Horovod see the workers of torchrun: set its variables, and start the rendezvous.

    If torchrun is killed, the workers that it started get SIGTERM, so that they save and end.

    Args:
        environ: torchrun's variables, to which those of Horovod are added.

    Raises:
        EnvironmentFault: If the workers cannot find each other, or have no common key.
    """
    end_with_parent(None)
    interface, address = _own_interface(environ)
    own: dict[str, Any] = {
        "group": int(environ["GROUP_RANK"]),
        "local_size": int(environ["LOCAL_WORLD_SIZE"]),
        "host": socket.gethostname(),
    }
    server = None
    if environ["RANK"] == "0":
        key, key_info = offer_key(environ)
        server = _start_server(address, key)
        own |= {"address": address, "port": server.server_address[1], **key_info}
    infos = _exchange(own, environ)
    plan = _allocate(infos)
    if server is not None:
        server.init(plan)
    _check_address(infos, environ)
    environ[KEY_VARIABLE] = key if server is not None else take_key(infos[0], environ)
    environ.update(_variables(plan[int(environ["RANK"])], infos[0], interface))
    _check_connection(infos[0])


def _own_interface(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and address of the interface for the job: loopback if all workers are on one host.

    With several hosts, it is the one with the route to torchrun's store, unless the user chose another.
    """
    own = [
        (name, text.partition("/")[0]) for name, texts in interfaces(loopback=True).items() for text in texts
    ]
    chosen = environ.get("HOROVOD_GLOO_IFACE")
    if chosen:
        found = next((pair for pair in own if pair[0] == chosen), None)
        if found is None:
            raise EnvironmentFault(
                f"host {socket.gethostname()} has no network interface {chosen} with an IPv4 address",
                "Set HOROVOD_GLOO_IFACE to an interface that it has.",
            )
        return found
    if environ["GROUP_WORLD_SIZE"] == "1":
        return next((pair for pair in own if pair[1] == "127.0.0.1"), own[0])
    target = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it only looks up the route
            address = probe.getsockname()[0]
    except OSError as error:
        raise EnvironmentFault(
            f"host {socket.gethostname()} has no route to MASTER_ADDR={target[0]}: {error.strerror or error}",
            "Give torchrun a --master-addr or --rdzv-endpoint that every host can reach.",
        ) from None
    return next((pair for pair in own if pair[1] == address), ("lo", address))


def _start_server(address: str, key: str) -> Any:
    """Start Horovod's rendezvous server on a free port of an address, in a thread."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    # a Horovod that was not built by hvdtrain takes requests without a key
    keyed = (key,) if "key" in inspect.signature(RendezvousHTTPServer).parameters else ()
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0, *keyed)
    threading.Thread(target=server.serve_forever, daemon=True, name="rendezvous").start()
    return server


def _exchange(own: Mapping[str, Any], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Collective. Return what each rank says of itself, in the order of ranks."""
    prefix = f"hvdtrain/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    command = [sys.executable, "-c", _EXCHANGE, prefix, str(_STORE_SECONDS)]
    # the key may be in it, so it is not on the command line
    done = subprocess.run(
        command, env=dict(environ), input=json.dumps(own), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it was ended")
        raise EnvironmentFault(
            f"rank {environ['RANK']} cannot exchange addresses through torchrun's store at "
            f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}: {said}",
            f"Start with `horovodrun -np {environ['WORLD_SIZE']} python -m hvdtrain ...` instead.",
        )
    return [json.loads(text) for text in json.loads(done.stdout.splitlines()[-1])]


def _allocate(infos: list[dict[str, Any]]) -> list[Any]:
    """Return Horovod's slots in the order of ranks; each node of torchrun is a host of its own."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments

    nodes = {info["group"]: HostInfo(f"{info['host']}-{info['group']}", info["local_size"]) for info in infos}
    plan: list[Any] = get_host_assignments([nodes[group] for group in sorted(nodes)], len(infos))
    groups = [int(slot.hostname.rpartition("-")[2]) for slot in plan]
    if groups != [info["group"] for info in infos]:
        raise EnvironmentFault(
            "torchrun did not number the workers host by host, as Horovod needs it",
            f"Start with `horovodrun -np {len(infos)} python -m hvdtrain ...` instead.",
            everywhere=True,
        )
    return plan


def _variables(slot: Any, rank_0: Mapping[str, Any], interface: str) -> dict[str, str]:
    """Return the variables that horovodrun gives a worker over Gloo."""
    return {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rank_0["address"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rank_0["port"]),
        "HOROVOD_GLOO_IFACE": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _check_address(infos: list[dict[str, Any]], environ: Mapping[str, str]) -> None:
    hosts = list(dict.fromkeys(info["host"] for info in infos))
    if len(hosts) > 1 and infos[0]["address"].startswith("127."):
        raise EnvironmentFault(
            f"on the host of rank 0, {hosts[0]}, MASTER_ADDR={environ['MASTER_ADDR']} is the address "
            f"{infos[0]['address']}, which {hosts[1]} cannot reach",
            "Give torchrun an IP address as --master-addr or --rdzv-endpoint, or set HOROVOD_GLOO_IFACE.",
            everywhere=True,
        )


def _check_connection(rank_0: Mapping[str, Any]) -> None:
    """Check that the rendezvous answers: Horovod itself would end without a message."""
    try:
        socket.create_connection((rank_0["address"], rank_0["port"]), _CONNECT_SECONDS).close()
    except OSError as error:
        raise EnvironmentFault(
            f"host {socket.gethostname()} cannot connect to rank 0 on {rank_0['host']}, at "
            f"{rank_0['address']}:{rank_0['port']}: {error.strerror or error}",
            "Hosts of a job must reach each other on all ports; HOROVOD_GLOO_IFACE chooses the interface.",
        ) from None
