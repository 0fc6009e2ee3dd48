"""A worker that enters and leaves the worlds that a test orders: ``python world_member.py``.

Orders come as lines of JSON on standard input, and each is answered by one line. The training thread does
them in turn, except ``abort``, which the thread that reads does at once, as that of an elastic job does.
"""

import json
import os
import queue
import sys
import threading
from types import SimpleNamespace

import horovod.torch as hvd
import torch

from hvdtrain.backends.torch.objective.gathering import COLLECTIVES
from hvdtrain.backends.workers import HorovodWorkers, abort_collectives, peer_errors
from hvdtrain.errors import HvdtrainError
from hvdtrain.workers.world import World

KEY = "5e" * 32


class Member:
    """What the training thread does."""

    def __init__(self) -> None:
        hvd.init()

        def enter(world):
            os.environ.update(world.environment(KEY))

        membership = SimpleNamespace(slot=0, slots_on_host=1, least=1, most=8, enter=enter)
        self._workers = HorovodWorkers(hvd, COLLECTIVES(), membership)

    def enter(self, order: dict) -> dict:
        self._workers.restart(World.model_validate(order["world"]))
        return {"rank": self._workers.rank, "ranks": self._workers.allgather_object(self._workers.rank)}

    def sum(self, order: dict) -> dict:
        with peer_errors():
            for _ in range(order["times"]):
                result = hvd.allreduce(
                    torch.full((order["length"],), order["value"]), op=hvd.Sum, name="sum"
                )[-1]
        return {"sum": float(result)}

    def leave(self, order: dict) -> dict:
        self._workers.leave(broken=order["broken"])
        threads, files = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("task", "fd"))
        return {"threads": threads, "files": files}


def read_orders(orders: "queue.Queue[dict]") -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "abort":
            abort_collectives("a test said so")
        else:
            orders.put(order)
    os._exit(0)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a framework prints is no answer

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    orders: queue.Queue[dict] = queue.Queue()
    member = Member()
    threading.Thread(target=read_orders, args=(orders,), daemon=True).start()
    answer(up=True)
    while True:
        order = orders.get()
        try:
            answer(**getattr(member, order["do"])(order))
        except HvdtrainError as error:
            answer(error=type(error).__name__, problem=error.problem, remedy=error.remedy)


if __name__ == "__main__":
    main()
