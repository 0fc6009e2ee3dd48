"""What native libraries would die of without a word, checked in this worker before they start."""

import os
import socket
from collections.abc import Mapping

from hvdtrain.addresses import chosen_interfaces, interfaces
from hvdtrain.errors import EnvironmentFault
from hvdtrain.terminal import launched_rank

_DOCTOR = "To see what is wrong where: python -m hvdtrain doctor --hostfile FILE"


def check_host(environ: Mapping[str, str] = os.environ) -> None:
    """Check this host's name and network interfaces. Local: no collective.

    Raises:
        EnvironmentFault: where Gloo or Open MPI could not start here.
    """
    host, alone = socket.gethostname(), launched_rank() is None
    # Gloo, which also serves one worker without a launcher, looks its host's name up, and crashes
    if alone or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        _check_name(host)
    if not alone and (chosen := chosen_interfaces(environ)):
        _check_interfaces(host, chosen)


def _check_name(host: str) -> None:
    try:
        socket.gethostbyname(host)
    except OSError as error:
        raise EnvironmentFault(
            f"host {host} cannot resolve its own name: {error.strerror or error}",
            f"Add it to /etc/hosts there, with the address that other hosts reach it by. {_DOCTOR}",
        ) from None


def _check_interfaces(host: str, chosen: list[str]) -> None:
    found = {name: texts[-1].partition("/")[0] for name, texts in interfaces(loopback=True).items()}
    if not any(name in found for name in chosen):
        there = ", ".join(f"{name} {address}" for name, address in found.items() if name != "lo")
        raise EnvironmentFault(
            f"host {host} has no network interface {' or '.join(chosen)} with an IPv4 address; it has "
            f"{there or 'loopback only'}",
            "All hosts of a job need one of the same name: rename it there, or choose another with "
            f"horovodrun --network-interfaces. {_DOCTOR}",
        )
