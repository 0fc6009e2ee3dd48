"""A worker of an elastic job without a framework: ``python elastic_worker.py FOLDER [WORD...]``.

It writes FOLDER/NAME.json with its environment and, when it enters a world, FOLDER/NAME.world. With the word
"wait" it trains until it is told to stop; without, it is done at once.
"""

import json
import os
import socket
import sys
from pathlib import Path

import psutil

from hvdtrain.elastic import messages
from hvdtrain.elastic.links import prove_to_driver
from hvdtrain.workers.world import TrainingPosition


def main(folder: Path, words: list[str]) -> int:
    """Be a worker until the end, and return the exit code."""
    environ = os.environ
    address, port = environ["HVDTRAIN_ELASTIC"].split(",")[0].rsplit(":", 1)
    name, host = environ["HVDTRAIN_WORKER"], environ["HOROVOD_HOSTNAME"]
    mark = folder / name
    mark.with_suffix(".json").write_text(json.dumps(dict(environ)))
    connection = socket.create_connection((address, int(port)))
    prove_to_driver(connection, environ["HOROVOD_RENDEZVOUS_KEY"], name)
    started = psutil.Process().create_time()
    hello = messages.Hello(host=host, machine=host, pid=os.getpid(), process_seconds=started)
    ready = messages.Ready(generation=0, place=TrainingPosition(), valid=True, digest="d", stall_timeout=30)
    connection.sendall(messages.encode(hello) + messages.encode(ready))
    for line in connection.makefile("rb"):
        message = messages.from_driver(line)
        assert message is not None, line
        if isinstance(message, messages.EnterWorld):
            world = message.world
            formed = messages.Formed(generation=world.generation)
            synced = messages.Synced(generation=world.generation, place=TrainingPosition())
            connection.sendall(messages.encode(formed) + messages.encode(synced))
            found = (world.generation, world.rank, world.size, os.getpid())
            mark.with_suffix(".world").write_text(" ".join(map(str, found)))
            if "wait" not in words:
                connection.sendall(messages.encode(messages.Done(exit_code=0)))
                return 0
        elif isinstance(message, messages.ChangeWorld | messages.Abort):
            connection.sendall(messages.encode(ready.model_copy(update={"generation": message.generation})))
        elif isinstance(message, messages.Stop):
            connection.sendall(messages.encode(messages.Done(exit_code=75)))
            return 75
    return 3


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
