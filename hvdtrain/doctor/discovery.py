"""Check the discovery script of an elastic job: what it prints, how long it takes, whether it varies."""

import time

from hvdtrain.elastic.driver.hosts import ScriptHosts
from hvdtrain.errors import DiscoveryError
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.tools.doctor.report import Finding

_CHECK = "host discovery"
_RUNS = 3
_SLOW_SECONDS = 2.0


def check_discovery(script: str, slots_per_host: int) -> tuple[list[HostSlots], list[Finding]]:
    """Run a discovery script some times, as an elastic job does once a second.

    Args:
        script: the script, a command of the shell.
        slots_per_host: slots of a host for which it prints no number.

    Returns:
        The hosts of the last run, and findings, which are listed with the first host.

    Raises:
        DiscoveryError: If a run fails, or there is no host to check.
    """
    notes: list[str] = []
    discovery = ScriptHosts(script, slots_per_host, note=notes.append)
    answers, slowest = [], 0.0
    for _ in range(_RUNS):
        since = time.monotonic()
        answers.append(discovery.find())
        slowest = max(slowest, time.monotonic() - since)
    hosts = answers[-1]
    if not hosts:
        raise DiscoveryError(
            f"host discovery script {script}: it names no host",
            "An elastic job waits for hosts. Start at least one, then run the doctor again.",
        )
    problems = [*((note, "Print each host once, with all its slots.") for note in notes)]
    if slowest > _SLOW_SECONDS:
        problems.append(
            (
                f"a run took {slowest:.1f} s",
                "It runs once a second: let it read what another process collects.",
            )
        )
    if any(sorted(one) == sorted(hosts) and one != hosts for one in answers):
        problems.append(("it prints the hosts in varying order", "Sort them: | sort"))
    elif any(one != hosts for one in answers):
        problems.append(
            (
                "its runs name different hosts",
                "Workers leave a host that is not named. Print those that stay.",
            )
        )
    findings = [Finding(hosts[0].name, _CHECK, "warn", found, remedy) for found, remedy in problems]
    named = f"{len(hosts)} hosts with {sum(one.slots for one in hosts)} slots"
    return hosts, findings or [Finding(hosts[0].name, _CHECK, "ok", named)]
