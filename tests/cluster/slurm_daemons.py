"""A real Slurm on the hosts of a cluster: slurmctld, and munged and slurmd on every host.

Two partitions share the nodes: a job in ``urgent`` takes them from one in ``batch``, which is signalled
and requeued. Nothing is installed or configured on the machine. Everything ends with the context.
"""

import contextlib
import functools
import os
import shutil
import stat
import time
import unittest
from collections.abc import Callable
from pathlib import Path

from hosts import Cluster, Host
from support import jobs

GRACE_SECONDS = 60  # what a preempted job gets between its signal and its end
_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "sinfo", "srun", "scancel")
_START_SECONDS = 180
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_CONFIG = """\
ClusterName=test
SlurmctldHost={head}({address})
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS=/run
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
"""
_NODE = "NodeName={name} NodeAddr={address} CPUs={slots} Gres=gpu:{slots}\n"
_PARTITIONS = """\
PartitionName=batch Nodes={nodes} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent Nodes={nodes} PriorityTier=10 PreemptMode=OFF
"""


@functools.cache
def unavailable() -> str | None:
    """Say what this machine lacks for a Slurm of its own, or None."""
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    return f"Slurm needs {', '.join(missing)} (slurmctld, slurmd, slurm-client, munge)" if missing else None


class Slurm:
    """Context with a Slurm whose nodes are the hosts of a cluster; its files are in what they share."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._folder = cluster, cluster.hostfile.parent / "slurm"
        self._ended = contextlib.ExitStack()

    def __enter__(self) -> "Slurm":
        if reason := unavailable():
            raise unittest.SkipTest(reason)  # pytest skips; anything else says the reason
        self._write()
        with contextlib.ExitStack() as starting:
            for host in self._cluster.hosts.values():
                self._start_munged(starting, host)
            self._start(starting, self._cluster.head, ["slurmctld", "-D"])
            for host in self._cluster.hosts.values():
                self._start(starting, host, ["slurmd", "-D", "-N", host.name])
            self._await_nodes()
            self._ended = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.close()

    def run(
        self, command: list[str], cwd: Path | None = None, timeout: float = jobs.LIMIT_SECONDS, **environ: str
    ) -> str:
        """Run a command on the head, which must end well; give what it printed."""
        result = self.tried(command, cwd, timeout, **environ)
        assert result.returncode == 0, f"{command}: {result.output}\n{self.logs()}"
        return result.stdout

    def tried(
        self, command: list[str], cwd: Path | None = None, timeout: float = jobs.LIMIT_SECONDS, **environ: str
    ) -> jobs.Result:
        """Run a command on the head; a job gets its environment, but not the mark of this one."""
        words = ["env", "-u", jobs.MARK, *command]
        return self._cluster.head.run(words, cwd=cwd, timeout=timeout, **environ, **self._environ)

    def submit(self, words: list[str], cwd: Path, **environ: str) -> str:
        """Give the id of a new batch job."""
        said = self.run(["sbatch", "--parsable", *words], cwd, **environ)
        return said.strip()

    def output(self, folder: Path, job: str) -> str:
        """Give what a job that was submitted in a folder has printed."""
        path = folder / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def await_end(self, job: str) -> str:
        """Wait until a job has ended; give its state."""
        return self.await_state(job, *ENDED, timeout=jobs.LIMIT_SECONDS)

    def state(self, job: str) -> str:
        """Give a job's state, as PENDING, RUNNING or COMPLETED."""
        return self.shown(job)["JobState"]

    def shown(self, job: str) -> dict[str, str]:
        """Give what the controller says of a job, by name."""
        words = self.run(["scontrol", "--oneliner", "show", "job", job]).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def await_state(self, job: str, *states: str, timeout: float) -> str:
        """Wait until a job is in one of these states; give it."""
        self.await_that(lambda: self.state(job) in states, f"job {job} is {' or '.join(states)}", timeout)
        return self.state(job)

    def await_that(
        self, condition: Callable[[], bool], said: str, timeout: float = jobs.LIMIT_SECONDS
    ) -> None:
        """Wait until something holds; fail where it does not in time."""
        deadline = time.monotonic() + timeout
        while not condition():
            shown = ["scontrol", "--oneliner", "show", "job"]
            assert time.monotonic() < deadline, f"not in {timeout} s: {said}\n{self.run(shown)}{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        """Give the ends of the daemons' logs."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    @property
    def _environ(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def _write(self) -> None:
        hosts, folder = self._cluster.hosts.values(), self._folder
        folder.mkdir(mode=0o700)
        (folder / "state").mkdir()
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_bytes(os.urandom(128))
        config = _CONFIG.format(
            head=self._cluster.head.name, address=self._cluster.head.address, folder=folder
        )
        config += "".join(_NODE.format(name=h.name, address=h.address, slots=h.slots) for h in hosts)
        config += _PARTITIONS.format(nodes=",".join(self._cluster.hosts), grace=GRACE_SECONDS)
        (folder / "slurm.conf").write_text(config)
        # Cards that are none: the scheduler counts them, and jobs get their numbers
        cards = ""
        for host in hosts:
            files = [folder / f"card-{host.name}-{number}" for number in range(host.slots)]
            for file in files:
                os.mknod(file, stat.S_IFCHR, os.makedev(1, 3))
                cards += f"NodeName={host.name} Name=gpu File={file}\n"
        (folder / "gres.conf").write_text(cards)

    def _start(self, stack: contextlib.ExitStack, host: Host, command: list[str]) -> None:
        """Start a daemon, which the stack ends."""
        daemon = stack.enter_context(host.started(command, **self._environ))
        stack.callback(daemon.process.terminate)

    def _start_munged(self, stack: contextlib.ExitStack, host: Host) -> None:
        """Start what signs the messages of a host, and wait until it answers; /run is the host's own."""
        files = {
            name: f"--{name}-file={self._folder}/munged-{host.name}.{name}" for name in ("pid", "log", "seed")
        }
        host.namespaces.succeed("mkdir", "-m", "755", "/run/munge")
        command = ["munged", "--foreground", f"--key-file={self._folder}/key", *files.values()]
        self._start(stack, host, command)
        deadline = time.monotonic() + _START_SECONDS
        while host.run(["munge", "--no-input"]).returncode:
            assert time.monotonic() < deadline, f"munged on {host.name} does not answer\n{self.logs()}"

    def _await_nodes(self) -> None:
        deadline, count = time.monotonic() + _START_SECONDS, len(self._cluster.hosts)
        while (said := self.tried(["sinfo", "-h", "-N", "-p", "batch", "-o", "%t"]).stdout.split()) != [
            "idle"
        ] * count:
            assert time.monotonic() < deadline, f"the nodes are {said}\n{self.logs()}"
            time.sleep(0.1)
