"""How Open MPI sums and sends, as settings of a launch.

Read in Open MPI 5.0 (``coll_tuned_decision_fixed.c``, ``coll_base_allreduce.c``, ``coll_han_module.c``) and
measured over links of 200 Mbit/s (docs/bench.md):

- For 256 KiB and more, from 4 workers on for 8 KiB and more, ``coll/tuned`` takes Rabenseifner's algorithm.
  If the number of workers is no power of two, some give their data to others first and get the whole sum at
  the end: with 3 workers three times the data, one part after the other, where a ring sends 4/3 of it.
- If hosts have several workers, ``coll/han`` comes first, which sums within each host before it sends.
- Linux lets several MB wait in a socket. What opens the next message then waits behind them, while the link
  carries little the other way.
"""

from collections.abc import Mapping
from types import MappingProxyType

ALL_REDUCE, SOCKETS = "mpi_allreduce", "mpi_socket_bytes"
ALL_REDUCE_VARIABLES, _TCP = "OMPI_MCA_coll_", "OMPI_MCA_btl_tcp_"
_FLAT = {f"{ALL_REDUCE_VARIABLES}han_priority": "0"}  # below that of coll/tuned
_SOCKET_BYTES = 2**18


def _algorithm(name: str) -> dict[str, str]:
    chosen = {f"{ALL_REDUCE_VARIABLES}tuned_use_dynamic_rules": "1"}
    return {**_FLAT, **chosen, f"{ALL_REDUCE_VARIABLES}tuned_allreduce_algorithm": name}


# by the name and the value that are shown: the variables that have it
_VARIABLES: Mapping[tuple[str, object], Mapping[str, str]] = MappingProxyType(
    {
        (SOCKETS, _SOCKET_BYTES): {f"{_TCP}{way}buf": str(_SOCKET_BYTES) for way in ("snd", "rcv")},
        (ALL_REDUCE, "flat"): _FLAT,
        **{(ALL_REDUCE, name): _algorithm(name) for name in ("ring", "recursive_doubling")},
    }
)


def mpi_settings(workers: int, hosts: int, environ: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return names and values of what to try over MPI; nothing that the environment chooses already.

    Args:
        workers: number of workers.
        hosts: on how many hosts they are.
        environ: the environment.
    """
    sums = []
    if hosts > 1:
        sums = [*(["flat"] if workers > hosts else []), "ring", "recursive_doubling"]
    elif workers > 2:  # two send as much in each way
        sums = ["ring"]
    found: list[tuple[str, object]] = [(SOCKETS, _SOCKET_BYTES)] if hosts > 1 else []
    found += [(ALL_REDUCE, value) for value in sums]
    return [setting for setting in found if not any(name in environ for name in _VARIABLES[setting])]


def variables_of(name: str, value: object) -> Mapping[str, str]:
    """Return the environment variables of a setting of MPI; none of another setting."""
    return _VARIABLES.get((name, value), {})


def without_mpi(environ: Mapping[str, str], name: str | None = None) -> dict[str, str]:
    """Return an environment without what sets MPI.

    Args:
        environ: the environment.
        name: the setting that is left out; None for all.
    """
    settings = [setting for setting in _VARIABLES if name in (None, setting[0])]
    names = {variable for setting in settings for variable in _VARIABLES[setting]}
    return {variable: value for variable, value in environ.items() if variable not in names}
