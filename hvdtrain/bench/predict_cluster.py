"""Whether the hosts, slots and links that a user asks for can be predicted from what is measured."""

from hvdtrain.bench.predict_forecast import counts_for
from hvdtrain.bench.predict_options import PlanOptions
from hvdtrain.errors import UsageError
from hvdtrain.words import counted


def check_cluster(hosts: int, slots: int, options: PlanOptions) -> None:
    """Check that a measurement can tell what the options ask for.

    Args:
        hosts: the hosts that are measured.
        slots: the workers of each.
        options: the options.

    Raises:
        UsageError: If it cannot.
    """
    if hosts > 1 and options.link is not None:
        raise UsageError(
            f"--link: sums over the network of {hosts} hosts do not tell what they take within a host",
            "Leave --link out to predict for that network, or measure on one host.",
            everywhere=True,
        )
    if options.slots is not None and hosts > 1 and options.slots < slots:
        raise UsageError(
            f"--slots {options.slots}: {hosts} hosts were measured with {slots} workers each, and "
            "what the network takes with fewer is unknown",
            f"Measure with {counted(options.slots, 'worker')} of a host, or leave --slots out.",
            everywhere=True,
        )
    if options.slots is not None and options.slots > slots:
        known = f"1 to {slots}" if slots > 1 and hosts == 1 else f"{slots}"
        raise UsageError(
            f"--slots {options.slots}: {counted(slots, 'worker')} of a host are measured here, and how fast "
            "each computes beside more of them is unknown",
            f"Give --slots {known} or leave it out, or measure with {options.slots} workers of a host.",
            everywhere=True,
        )
    slots = options.slots or slots
    if not counts_for(options.hosts, slots, measured_network=hosts > 1):
        raise UsageError(
            f"--hosts {options.hosts} with {counted(slots, 'worker')} each: there is nothing to predict",
            "Give more hosts (--hosts) or more workers of a host (--slots).",
            everywhere=True,
        )
    if options.hosts == 1 and options.link is not None:
        raise UsageError(
            "--link: with --hosts 1 no message takes a link between hosts",
            "Give more hosts (--hosts), or leave --link out.",
            everywhere=True,
        )
