"""The process that holds one host's namespaces, and takes all of it down when its standard input ends.

Started inside new namespaces. Reads one line of JSON: ``name`` (the host's name or null), ``commands``
(set up the host's file systems), ``remove`` (folders to remove at the end). Says ``ready``. The input
also ends when the process that started it dies, by whatever signal: nothing can be left behind.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

_KILL_SECONDS = 90


def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    if wanted["name"] is not None:
        socket.sethostname(wanted["name"])
    for command in wanted["commands"]:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    print("ready", flush=True)
    sys.stdin.read()
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := _others()) and time.monotonic() < deadline:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for folder in wanted["remove"]:
        shutil.rmtree(folder)
    if left:
        sys.exit(f"processes that did not end: {left}")


def _others() -> list[int]:
    """Give the other live processes in this network namespace."""
    mine, found = os.readlink("/proc/self/ns/net"), []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                if os.readlink(f"/proc/{name}/ns/net") == mine:
                    found.append(int(name))
            except OSError:  # it ended, or is a zombie
                pass
    return found


if __name__ == "__main__":
    main()
