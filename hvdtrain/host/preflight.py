"""Check, before native libraries start, what would make them crash without a message."""

import os
import socket
from collections.abc import Mapping

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.launcher import is_elastic, launched_rank
from hvdtrain.host.network import chosen_interfaces, interfaces

_DOCTOR = "To check all hosts: python -m hvdtrain doctor --hostfile FILE"


def check_host(environ: Mapping[str, str] = os.environ) -> None:
    """Check this host's name and network interfaces. Local.

    Raises:
        EnvironmentFault: If Gloo or Open MPI cannot start on this host.
    """
    host, alone = socket.gethostname(), launched_rank() is None
    # Gloo, which is also used without a launcher, crashes if it cannot resolve its host's name
    if alone or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        _check_name(host)
    if (not alone or is_elastic(environ)) and (chosen := chosen_interfaces(environ)):
        _check_interfaces(host, chosen)


def _check_name(host: str) -> None:
    try:
        socket.gethostbyname(host)
    except OSError as error:
        raise EnvironmentFault(
            f"host {host} cannot resolve its own name: {error.strerror or error}",
            f"Add it to /etc/hosts there, with the address at which other hosts reach it. {_DOCTOR}",
        ) from None


def _check_interfaces(host: str, chosen: list[str]) -> None:
    found = {name: texts[-1].partition("/")[0] for name, texts in interfaces(loopback=True).items()}
    if not any(name in found for name in chosen):
        existing = ", ".join(f"{name} {address}" for name, address in found.items() if name != "lo")
        raise EnvironmentFault(
            f"host {host} has no network interface {' or '.join(chosen)} with an IPv4 address; it has "
            f"{existing or 'loopback only'}",
            "All hosts of a job need an interface of the same name: rename it there, or choose another with "
            f"horovodrun --network-interfaces. {_DOCTOR}",
        )
