"""Workers that torchrun started: Horovod's variables, agreed on through torchrun's own store."""

import inspect
import json
import os
import secrets
import socket
import stat
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from tempfile import NamedTemporaryFile
from typing import Any

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.environment import check_interfaces
from hvdtrain.host.hostfile import address_towards, interfaces
from hvdtrain.host.processes import end_with_parent
from hvdtrain.workers.world import KEY_VARIABLE

_STORE_SECONDS = 60
_CONNECT_SECONDS = 10


def join_torchrun(environ: MutableMapping[str, str] = os.environ) -> None:
    """Collective. Let Horovod see the workers of torchrun: set its variables, and start the rendezvous."""
    end_with_parent(None)
    rank, (interface, address) = int(environ["RANK"]), _own_interface(environ)
    group, local_size = int(environ["GROUP_RANK"]), int(environ["LOCAL_WORLD_SIZE"])
    own: dict[str, Any] = {"group": group, "local_size": local_size, "host": socket.gethostname()}
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
    _check_connection(infos[0])
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars

    environ.update(create_slot_env_vars(plan[rank]))
    environ.update(create_run_env_vars(infos[0]["address"], [interface], str(infos[0]["port"])))


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
    own, key, file = environ.get(KEY_VARIABLE), rank_0.get("key"), rank_0.get("key_file")
    if bool(own) == bool(file or key):
        who, other = (f"rank {environ['RANK']}", "rank 0") if own else ("rank 0", f"rank {environ['RANK']}")
        remedy = "Set it to the same secret text on every host, or on none."
        raise EnvironmentFault(f"{KEY_VARIABLE} is set for {who} and not for {other}", remedy)
    if own or environ["GROUP_WORLD_SIZE"] != "1":
        return own or str(key)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(str(file), flags), encoding="ascii") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError("it is not a file of this user alone")
            return opened.read()
    except OSError as error:
        raise EnvironmentFault(
            f"rank 0 does not hand out the key of this job, in {file}: {error.strerror or error}",
            f"Set {KEY_VARIABLE} to the same secret text for all workers.",
        ) from None


def _own_interface(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and address of the interface for the job: loopback if all workers are on one host."""
    chosen, wanted = environ.get("HOROVOD_GLOO_IFACE"), "127.0.0.1"
    if chosen:
        check_interfaces(socket.gethostname(), [chosen])
    elif environ["GROUP_WORLD_SIZE"] != "1":  # without a route, the exchange over the store fails
        wanted = address_towards(environ["MASTER_ADDR"]) or wanted
    for name, texts in interfaces(loopback=True).items():
        for address in (text.partition("/")[0] for text in texts):
            if name == chosen or (not chosen and address == wanted):
                return name, address
    return "lo", wanted


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
        distributed, timeout = import_module("torch.distributed"), timedelta(seconds=_STORE_SECONDS)
        store, rank, size = next(distributed.rendezvous("env://", timeout=timeout))
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


def _check_connection(rank_0: Mapping[str, Any]) -> None:
    """Check that the rendezvous answers: Horovod itself would end without a message."""
    try:
        socket.create_connection((rank_0["address"], rank_0["port"]), _CONNECT_SECONDS).close()
    except OSError as error:
        raise EnvironmentFault(
            f"host {socket.gethostname()} cannot connect to rank 0 on {rank_0['host']}, at "
            f"{rank_0['address']}:{rank_0['port']}: {error.strerror or error}",
            "Give torchrun an IP address as --master-addr or --rdzv-endpoint, or set HOROVOD_GLOO_IFACE.",
        ) from None
