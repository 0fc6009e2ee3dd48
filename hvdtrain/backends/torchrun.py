"""Workers that torchrun started: Horovod's variables, agreed on through torchrun's own store.

Horovod over Gloo needs the rank, size and host of each worker, and a rendezvous server, as horovodrun gives
them. torchrun states ranks and sizes, and runs a key-value store. Rank 0 runs the server, in a thread.
"""

import inspect
import json
import os
import secrets
import socket
import stat
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from importlib import import_module
from tempfile import NamedTemporaryFile
from typing import Any

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.hostfile import interfaces
from hvdtrain.host.processes import end_with_parent
from hvdtrain.workers.world import KEY_VARIABLE

_STORE_SECONDS = 60
_CONNECT_SECONDS = 10
_NAMES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")  # of Horovod's slots


def join_torchrun(environ: MutableMapping[str, str] = os.environ) -> None:
    """Collective. Let Horovod see the workers of torchrun: set its variables, and start the rendezvous."""
    end_with_parent(None)
    rank, (interface, address) = int(environ["RANK"]), _own_interface(environ)
    own: dict[str, Any] = {
        "group": int(environ["GROUP_RANK"]),
        "local_size": int(environ["LOCAL_WORLD_SIZE"]),
        "host": socket.gethostname(),
    }
    server = None
    with ExitStack() as stack:
        if rank == 0:
            key, offered = offer_key(environ, stack)
            server = _start_server(address, key)
            own |= {"address": address, "port": server.server_address[1], **offered}
        infos = _exchange("infos", own, environ)
        plan = _allocate(infos)
        if server is not None:
            server.init(plan)
        environ[KEY_VARIABLE] = key if server is not None else take_key(infos[0], environ)
        _exchange("taken", {}, environ)  # rank 0 then removes the file of the key
    environ.update(_variables(plan[rank], infos[0], interface))
    _check_connection(infos[0])


def offer_key(environ: Mapping[str, str], stack: ExitStack) -> tuple[str, dict[str, str]]:
    """Return the key that rank 0 chooses, and what others get it by: on one host, a file of this user."""
    if key := environ.get(KEY_VARIABLE):
        return key, {}
    key = secrets.token_hex(32)
    if environ["GROUP_WORLD_SIZE"] != "1":
        return key, {"key": key}
    file = stack.enter_context(NamedTemporaryFile("w", prefix="hvdtrain-key-"))  # noqa: SIM115
    file.write(key)
    file.flush()
    return key, {"key_file": file.name}


def take_key(rank_0: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return the key, as another rank."""
    own = environ.get(KEY_VARIABLE)
    if bool(own) == bool(rank_0.get("key_file") or rank_0.get("key")):
        who, other = (f"rank {environ['RANK']}", "rank 0") if own else ("rank 0", f"rank {environ['RANK']}")
        raise EnvironmentFault(
            f"{KEY_VARIABLE} is set for {who} and not for {other}",
            "Set it to the same secret text on every host, or on none.",
        )
    if own or environ["GROUP_WORLD_SIZE"] != "1":
        return own or str(rank_0.get("key"))
    file = str(rank_0.get("key_file"))
    try:
        with open(file, encoding="ascii", opener=_open_own) as opened:
            return opened.read()
    except OSError as error:
        raise EnvironmentFault(
            f"rank 0 does not hand out the key of this job, in {file}: {error.strerror or error}",
            "If somebody else may write to torchrun's store, start again with another --rdzv-id and port. "
            f"Otherwise set {KEY_VARIABLE} to the same secret text for all workers.",
        ) from None


def _open_own(path: str, flags: int) -> int:
    """Open a file that this user alone can write and read."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError("it is not a file of this user alone")
    return descriptor


def _own_interface(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and address of the interface for the job: loopback if all workers are on one host.

    With several hosts, it is the one with the route to torchrun's store, unless the user chose another.
    """
    own = [
        (name, text.partition("/")[0]) for name, texts in interfaces(loopback=True).items() for text in texts
    ]
    chosen, wanted = environ.get("HOROVOD_GLOO_IFACE"), "127.0.0.1"
    if chosen is None and environ["GROUP_WORLD_SIZE"] != "1":
        # sends nothing: it only looks up the route. Without one, the exchange over the store fails
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((environ["MASTER_ADDR"], int(environ["MASTER_PORT"])))
            wanted = probe.getsockname()[0]
    found = next((pair for pair in own if chosen == pair[0] or (not chosen and wanted == pair[1])), None)
    if found is None and chosen:
        raise EnvironmentFault(
            f"host {socket.gethostname()} has no network interface {chosen} with an IPv4 address",
            "Set HOROVOD_GLOO_IFACE to an interface that it has.",
        )
    return found or ("lo", wanted)


def _start_server(address: str, key: str) -> Any:
    """Start Horovod's rendezvous server on a free port of an address, in a thread."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    # a Horovod that was not built by hvdtrain takes requests without a key
    keyed = (key,) if "key" in inspect.signature(RendezvousHTTPServer).parameters else ()
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0, *keyed)
    threading.Thread(target=server.serve_forever, daemon=True, name="rendezvous").start()
    return server


def _exchange(name: str, own: Mapping[str, Any], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Collective. Return what each rank sends under a name, in the order of ranks."""
    prefix = f"hvdtrain/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
    try:
        found = import_module("torch.distributed").rendezvous(
            "env://", timeout=timedelta(seconds=_STORE_SECONDS)
        )
        store, rank, size = next(found)
        store.set(f"{prefix}/{rank}", json.dumps(own))
        return [json.loads(store.get(f"{prefix}/{other}")) for other in range(size)]
    except (RuntimeError, OSError, ValueError) as error:
        raise EnvironmentFault(
            f"rank {environ['RANK']} cannot exchange addresses through torchrun's store at "
            f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}: {error}",
            f"Start with `horovodrun -np {environ['WORLD_SIZE']} python -m hvdtrain ...` instead.",
        ) from None


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
        **{f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in _NAMES},
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rank_0["address"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rank_0["port"]),
        "HOROVOD_GLOO_IFACE": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _check_connection(rank_0: Mapping[str, Any]) -> None:
    """Check that the rendezvous answers: Horovod itself would end without a message."""
    try:
        socket.create_connection((rank_0["address"], rank_0["port"]), _CONNECT_SECONDS).close()
    except OSError as error:
        raise EnvironmentFault(
            f"host {socket.gethostname()} cannot connect to rank 0 on {rank_0['host']}, at "
            f"{rank_0['address']}:{rank_0['port']}: {error.strerror or error}",
            "Hosts of a job must reach each other on all ports. Give torchrun an IP address as --master-addr "
            "or --rdzv-endpoint, or set HOROVOD_GLOO_IFACE to the interface.",
        ) from None
