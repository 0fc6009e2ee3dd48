"""Which hosts and numbers of workers a plan predicts."""

from collections import Counter
from collections.abc import Sequence

from hvdtrain.errors import UsageError
from hvdtrain.storage.text import counted
from hvdtrain.tools.bench.forecast import counts_for
from hvdtrain.tools.bench.plan_options import PlanOptions


def check_hosts(hosts: Sequence[str], local_sizes: Sequence[int]) -> None:
    """Check that there are several workers, as many on all hosts, and that hosts have names of their own.

    Args:
        hosts: by rank, the worker's host.
        local_sizes: by rank, how many workers its host has.

    Raises:
        UsageError: If not.
    """
    counts = Counter(hosts)
    if len(hosts) < 2:
        problem = "a plan is computed from sums over two workers or more, and this job has one"
        remedy = "Start more, for example: horovodrun -np 2 python -m hvdtrain plan ..."
    elif any(counts[host] != size for host, size in zip(hosts, local_sizes, strict=True)):
        problem = f"hosts have the same name ({', '.join(counts)}), so which workers share one is unknown"
        remedy = "Give each host a hostname of its own."
    elif len(set(counts.values())) > 1:
        given = ",".join(f"{host}:{number}" for host, number in counts.items())
        problem = f"hosts with different numbers of workers ({given}); a plan takes all hosts to be alike"
        alike = ",".join(f"{host}:{min(counts.values())}" for host in counts)
        remedy = f"Start as many on each, for example: -H {alike}"
    else:
        return
    raise UsageError(problem, remedy, everywhere=True)


def check_cluster(hosts: int, slots: int, options: PlanOptions) -> None:
    """Check that what the options name follows from a measurement.

    Args:
        hosts: the hosts that are measured.
        slots: the workers of each.
        options: the options.

    Raises:
        UsageError: If it does not.
    """
    wanted = options.slots or slots
    if hosts > 1 and options.link is not None:
        problem = f"--link: sums over the network of {hosts} hosts do not show what they take within a host"
        remedy = "Leave --link out to predict for that network, or measure on one host."
    elif wanted > slots or (hosts > 1 and wanted < slots):
        problem = f"--slots {wanted}: {counted(slots, 'worker')} of a host are measured here, which compute "
        problem += "and communicate differently"
        known = f"1 to {slots}" if slots > 1 and hosts == 1 else f"{slots}"
        remedy = f"Give --slots {known} or leave it out, or measure with {wanted} workers of a host."
    elif not counts_for(options.hosts, wanted, measured_network=hosts > 1):
        problem = f"--hosts {options.hosts} with {counted(wanted, 'worker')} each leave nothing to predict"
        remedy = "Give more hosts (--hosts) or more workers of a host (--slots)."
    elif options.hosts == 1 and options.link is not None:
        problem = "--link: with --hosts 1 no message takes a link between hosts"
        remedy = "Give more hosts (--hosts), or leave --link out."
    else:
        return
    raise UsageError(problem, remedy, everywhere=True)
