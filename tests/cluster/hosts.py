"""Several hosts on one machine: each with its own network, name, /etc/hosts, home, /dev/shm and sshd.

    with Cluster({"h1": 2, "h2": 1}, shared=folder) as cluster:
        cluster.head.run(["horovodrun", "-np", "3", "-H", cluster.words(), "python", ...], cwd=folder)

A host is a set of namespaces held by a process of its own. The hosts' links meet at a bridge in one
more namespace, so nothing of a cluster shows on the machine and clusters never meet. Needs root.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from image_hosts import image_hosts
from machine_hosts import HostFiles, machine_hosts
from namespaces import Namespaces
from support import jobs

_TOOLS = ("ip", "tc", "ssh", "sshd", "ssh-keygen", "unshare", "nsenter", "mount", "env")
_START_SECONDS = 180
FOLDER_PREFIX = f"hvdtrain-hosts-{os.getpid()}-"
_NETWORK = "10.83.0"


@functools.cache
def unavailable() -> str | None:
    """Say why this machine cannot hold hosts, or None where it can."""
    if os.getuid() != 0:
        return "several hosts on one machine need root"
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    if missing:
        return (
            f"several hosts on one machine need {', '.join(missing)} (iproute2, openssh-server, util-linux)"
        )
    links = "ip link add name switch type bridge && ip link add name one type veth peer name other"
    trial = f"mount -t tmpfs none /mnt && {links}"
    command = ["unshare", "--net", "--mount", "--uts", "--propagation", "private", "sh", "-c", trial]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"this machine allows no namespaces: {done.stderr.strip()}" if done.returncode else None


def bits_per_second(rate: str) -> float:
    """Return a rate as a number: "200mbit" is 2e8."""
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return float(rate[:-4]) * units[rate[-4:]]


class Host:
    """One host of a cluster; commands run on it as if typed there."""

    def __init__(self, name: str, slots: int, address: str, files: HostFiles, switch: Namespaces) -> None:
        self.name, self.slots, self.address = name, slots, address
        self._files, self._switch = files, switch
        self._port = "port" + address.rpartition(".")[2]  # the switch's end of the cable
        self.namespaces = Namespaces(name, files.mounts)

    def enter(self, words: list[str], cwd: Path | None = None) -> list[str]:
        """Give the command that runs ``words`` on this host; it keeps its process id there."""
        folder = [] if cwd is None else ["env", f"--chdir={cwd}"]
        return self.namespaces.enter([*folder, *self._files.prefix, *words])

    def started(self, command: list[str], *, cwd: Path | None = None, **environ: str) -> jobs.started:
        """Give a context with a command that runs here, as `jobs.started`."""
        return jobs.started(self.enter(command, cwd), Path("/"), **environ)

    def run(
        self,
        command: list[str],
        *,
        cwd: Path | None = None,
        timeout: float = jobs.LIMIT_SECONDS,
        **environ: str,
    ) -> jobs.Result:
        """Run a command here to its end, as `jobs.run`."""
        with self.started(command, cwd=cwd, **environ) as job:
            return job.wait(timeout)

    def bind(self, source: Path, target: Path) -> None:
        """Show ``source`` in the place of ``target``, a file or folder, on this host alone."""
        self.namespaces.succeed("mount", "--bind", str(source), str(target))

    def link(self, rate: str | None, delay: str | None = None) -> None:
        """Connect this host to the switch, by a link of this rate in each direction and this delay in one."""
        inside, outside = self.namespaces.network, self._switch.network
        peer = ["type", "veth", "peer", "name", "eth0", "netns", str(self.namespaces.pid)]
        outside("ip", "link", "add", "name", self._port, *peer)
        outside("ip", "link", "set", self._port, "master", "switch", "up")
        inside("ip", "link", "set", "lo", "up")
        inside("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        inside("ip", "link", "set", "eth0", "up")
        if rate:
            # a burst of 5 ms: with a shorter one, a fast link gives a third of its rate
            burst = f"{max(1, round(bits_per_second(rate) / 8 / 200 / 1024))}kb"
            limit = ["root", "handle", "1:", "tbf", "rate", rate, "burst", burst, "latency", "100ms"]
            inside("tc", "qdisc", "add", "dev", "eth0", *limit)
            outside("tc", "qdisc", "add", "dev", self._port, *limit)
        if delay:
            parent = ["parent", "1:"] if rate else ["root"]
            late = ["netem", "delay", delay, "limit", "100000"]
            outside("tc", "qdisc", "add", "dev", self._port, *parent, *late)

    def disconnect(self) -> None:
        """Pull the cable: the interface stays, and nothing gets through."""
        self._switch.succeed("ip", "link", "set", self._port, "down")

    def connect(self) -> None:
        """Put the cable back."""
        self._switch.succeed("ip", "link", "set", self._port, "up")

    def sent_bytes(self) -> int:
        """Return the bytes that this host has sent since it is connected."""
        return int(self.namespaces.succeed("cat", "/sys/class/net/eth0/statistics/tx_bytes"))

    def start_sshd(self, *options: str) -> None:
        """Start the ssh daemon, with more options, and wait until it listens."""
        self.namespaces.succeed(*self._files.prefix, *self._files.sshd, *options)
        deadline = time.monotonic() + _START_SECONDS
        while not self.namespaces.listens(self._files.port):
            assert time.monotonic() < deadline, f"sshd on {self.name} does not listen"
            time.sleep(0.02)

    def stop_sshd(self) -> None:
        """Stop the ssh daemon with all its sessions."""
        self.namespaces.kill("sshd")


class Cluster:
    """Context with several hosts that reach one another, also by ssh; the first is the head.

    Args:
        slots: The hosts in order and their numbers of workers; 0 for a host that has none.
        rate: What every link carries in each direction, as ``tc`` writes it: "200mbit".
        delay: How late what is sent to a host comes there: "5ms".
        root: Root file system of an image: every host gets it with an overlay of its own, and its
            entry point starts sshd. Without it, the hosts show this machine's files.
        shared: A folder that every host has at the same path; the hostfile is written there.
    """

    def __init__(
        self,
        slots: dict[str, int],
        *,
        shared: Path,
        rate: str | None = None,
        delay: str | None = None,
        root: Path | None = None,
    ) -> None:
        self._slots, self._root, self._shared = slots, root, shared
        self._rate, self._delay = rate, delay
        self.hostfile = shared / "hostfile.txt"
        self.hosts: dict[str, Host] = {}
        self._ended = contextlib.ExitStack()

    @property
    def head(self) -> Host:
        return next(iter(self.hosts.values()))

    def words(self) -> str:
        """Give the value of -H: hosts and slots."""
        return ",".join(f"{name}:{count}" for name, count in self._slots.items() if count)

    def __enter__(self) -> "Cluster":
        if reason := unavailable():
            raise unittest.SkipTest(reason)  # pytest skips; anything else says the reason
        with contextlib.ExitStack() as starting:
            self._start(starting)
            self._ended = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        switch = Namespaces(None, [], remove=[folder])
        stack.callback(switch.close)
        switch.succeed("ip", "link", "add", "name", "switch", "type", "bridge")
        switch.succeed("ip", "link", "set", "switch", "up")
        addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(self._slots, 1)}
        if self._root is None:
            all_files = machine_hosts(folder, addresses)
        else:
            all_files = image_hosts(folder, addresses, self._root, self._shared)
        for name, files in all_files.items():
            host = Host(name, self._slots[name], addresses[name], files, switch)
            stack.callback(host.namespaces.close)
            host.link(self._rate, self._delay)
            host.start_sshd()
            self.hosts[name] = host
        lines = [f"{name} slots={count}\n" for name, count in self._slots.items() if count]
        self.hostfile.write_text("".join(lines))
        answer = self.head.run(files.ready, timeout=_START_SECONDS)
        assert answer.returncode == 0, f"not every host lets {self.head.name} in: {answer.output}"
