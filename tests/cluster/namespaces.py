"""Namespaces of one host, held by a process that ends with this one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

_HOLDER = Path(__file__).with_name("namespace_holder.py")
_END_SECONDS = 120


class Namespaces:
    """A network, a name and mounts of their own; all in them ends with `close`, or with this process."""

    def __init__(self, name: str | None, commands: list[list[str]], remove: list[Path] | None = None) -> None:
        unshare = ["unshare", "--net", "--mount", "--uts", "--propagation", "private"]
        self._holder = subprocess.Popen(
            [*unshare, sys.executable, str(_HOLDER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, not for the hosts
        )
        self.pid = self._holder.pid
        wanted = {"name": name, "commands": commands, "remove": [str(folder) for folder in remove or []]}
        print(json.dumps(wanted), file=self._holder.stdin, flush=True)
        if self._holder.stdout.readline().strip() != "ready":
            _, said = self._holder.communicate(timeout=_END_SECONDS)
            raise RuntimeError(f"namespaces of {name}: {said}")

    def close(self) -> None:
        """End everything in the namespaces, and see that nothing is left."""
        try:
            _, said = self._holder.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            _, said = self._holder.communicate()
        assert self._holder.returncode == 0, f"namespaces did not end well: {said}"

    def enter(self, words: list[str]) -> list[str]:
        """Give the command that runs ``words`` here; its process becomes that of ``words``."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--", *words]

    def succeed(self, *words: str) -> str:
        """Run a short command here, which must end well; give what it printed."""
        return self._succeed(self.enter(list(words)))

    def network(self, *words: str) -> str:
        """Run one of this machine's own programs, which an image may lack, in the network of this host."""
        return self._succeed(["nsenter", "--target", str(self.pid), "--net", "--", *words])

    def _succeed(self, words: list[str]) -> str:
        done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
        return done.stdout

    def pids(self, name: str) -> list[int]:
        """Give the processes here whose program has this name."""
        found, network = [], os.readlink(f"/proc/{self.pid}/ns/net")
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    named = (folder / "comm").read_text().strip() == name
                    if named and os.readlink(folder / "ns" / "net") == network:
                        found.append(int(folder.name))
                except OSError:  # it ended
                    pass
        return found

    def kill(self, name: str) -> None:
        """Kill the processes here whose program has this name."""
        for pid in self.pids(name):
            os.kill(pid, signal.SIGKILL)

    def listens(self, port: int) -> bool:
        """Whether something here accepts TCP connections on a port."""
        sockets = Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]
        return any(
            words[1].endswith(f":{port:04X}") and words[3] == "0A" for words in map(str.split, sockets)
        )
