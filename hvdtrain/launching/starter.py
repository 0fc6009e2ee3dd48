"""Starts a launcher that ends when the process ends that started this one, for whatever reason."""

import os
import sys

from hvdtrain.host.processes import end_with_parent


def main() -> None:
    """Become the command in the arguments, after the process id of the parent."""
    parent, *command = sys.argv[1:]
    end_with_parent(int(parent))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
