"""Which hosts an elastic job may use now: a fixed list, or what a discovery script prints."""

import ipaddress
import os
import threading
from collections.abc import Callable

from hvdtrain.errors import DiscoveryError
from hvdtrain.host.hostfile import HOST_LINE, HOST_NAME, HostSlots
from hvdtrain.host.processes import run_limited
from hvdtrain.storage.text import printable

RUN_SECONDS = 10.0
EVERY_SECONDS = 1.0
_NOT_FOUND = 127  # of the shell
_MAX_ERROR_CHARACTERS = 1 << 12
_MAX_SLOTS = 4096


def parse_hosts(text: str, slots_per_host: int = 1) -> list[HostSlots]:
    """Parse hosts, one a line: ``host``, ``host:slots`` or ``host slots=N``; # begins a comment.

    An IPv6 address with slots is written in brackets. A host with 0 slots is left out. A host that is named
    twice has the larger number of slots.
    """
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            host, slots = _parse_entry(entry, slots_per_host)
        except ValueError as error:
            raise DiscoveryError(
                f"line {number}, {printable(entry[:100])!r}: {error}",
                "Each line must be host:slots, or only host.",
            ) from None
        found[host] = max(slots, found.get(host, 0))
    return [HostSlots(host, slots) for host, slots in found.items() if slots]


def _parse_entry(entry: str, slots_per_host: int) -> tuple[str, int]:
    if match := HOST_LINE.fullmatch(entry):
        host, slots = match[1], match[2]
    elif entry.startswith("["):
        host, _, rest = entry[1:].partition("]")
        if rest and not rest.startswith(":"):
            raise ValueError("after ] there must be : and a number of slots")
        slots = rest[1:] or str(slots_per_host)
    elif entry.count(":") > 1:
        host, slots = entry, str(slots_per_host)
    else:
        host, colon, slots = entry.partition(":")
        slots = slots if colon else str(slots_per_host)
    if ":" in host or entry.startswith("["):
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError("this is not an IPv6 address") from None
    elif not HOST_NAME.fullmatch(host):
        raise ValueError("this is not the name or the address of a host")
    if not slots.isascii() or not slots.isdecimal() or int(slots) > _MAX_SLOTS:
        raise ValueError(f"{slots!r} is not a number of slots between 0 and {_MAX_SLOTS}")
    return host, int(slots)


class ScriptHosts:
    """Hosts that a script prints."""

    def __init__(self, script: str, slots_per_host: int = 1, run_seconds: float = RUN_SECONDS) -> None:
        self.script, self._slots_per_host, self._run_seconds = script, slots_per_host, run_seconds

    def find(self) -> list[HostSlots]:
        """Run the script, and return the hosts that it prints."""
        try:
            return parse_hosts(self._run(), self._slots_per_host)
        except DiscoveryError as error:
            problem = f"host discovery script {self.script}: {error.problem}"
            raise DiscoveryError(problem, error.remedy) from None

    def _run(self) -> str:
        try:
            done = run_limited(["/bin/sh", "-c", self.script], self._run_seconds)
        except (OSError, ValueError) as error:
            raise DiscoveryError(f"it cannot be started: {error}") from None
        errors = printable(" ".join(done.errors[:_MAX_ERROR_CHARACTERS].split()))
        said, code = f"; it said: {errors}" if errors else "", done.code
        if code is None:
            raise DiscoveryError(
                f"it did not end within {self._run_seconds:g} s{said}",
                "Let it print what is known, for example from a file that another process keeps up to date.",
            )
        if done.is_cut:
            raise DiscoveryError("it printed more than 1 MiB", "It should print one line per host.")
        if code:
            number = -code if code < 0 else code - 128  # the script's own end, or what its shell says of it
            found = f"signal {number} ended it" if number > 0 else f"it ended with exit code {code}"
            raise DiscoveryError(f"{found}{said}", self._remedy(code))
        return done.output

    def _remedy(self, code: int) -> str:
        """Return what to do about a script that failed."""
        first = self.script.split()[0] if self.script.split() else ""
        if code == _NOT_FOUND and first and "/" not in first and os.path.exists(first):
            return f"It is in this folder: write ./{self.script}"
        return f"Run it by hand to see more: {self.script}"


class HostWatch:
    """The hosts that there are now, looked up again and again by a thread; an error keeps the last answer."""

    def __init__(
        self, script: ScriptHosts, say: Callable[[str], None], every_seconds: float = EVERY_SECONDS
    ) -> None:
        self._script, self._say, self._every_seconds = script, say, every_seconds
        self._hosts: list[HostSlots] = []
        self._problem = ""
        self._is_closing = threading.Event()

    def start(self) -> None:
        """Look the hosts up for the first time, and continue in a thread."""
        self._hosts = self._script.find()
        if not self._hosts:
            self._say("the host discovery script names no host with slots yet; it is run again every second")
        threading.Thread(target=self._follow, name="host discovery", daemon=True).start()

    def hosts(self) -> list[HostSlots]:
        """Return the hosts of the last good answer."""
        return self._hosts

    def close(self) -> None:
        """Look no further. It does not wait."""
        self._is_closing.set()

    def _follow(self) -> None:
        while not self._is_closing.wait(self._every_seconds):
            self.look()

    def look(self) -> None:
        """Look the hosts up once more."""
        try:
            hosts = self._script.find()
            if not hosts and self._hosts:
                raise DiscoveryError("the host discovery script no longer names a host")
        except DiscoveryError as error:
            self._report(f"{error}\nThe hosts that were found before remain.")
            return
        if self._problem:
            self._report("")
            self._say(f"host discovery works again: {sum(host.slots for host in hosts)} slots")
        self._hosts = hosts

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            self._say(problem)
        self._problem = problem
