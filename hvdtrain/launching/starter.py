"""Starts a launcher that ends when the process ends that started this one, for whatever reason."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command in the arguments, after the process id of the parent."""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != int(parent):  # it ended before
        os._exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
