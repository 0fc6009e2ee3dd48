"""What pools run for test_objects.py."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.backends import load_backend
from hvdtrain.backends.workers import GATHER
from hvdtrain.config import Layer
from hvdtrain.errors import ExchangeError
from hvdtrain.jobs.opening.setup import prepare


class Executed:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def backend_of(framework):
    fields = {"framework": framework, "task": "digits", "device": "cpu", "threads": 1}
    return load_backend(prepare([Layer("options", fields)]).config)


def collectives_of(framework):
    if framework == "torch":
        from hvdtrain.backends.torch.objective.evaluation import HorovodCollectives
    else:
        from hvdtrain.backends.tensorflow.objective.evaluation import HorovodCollectives
    return HorovodCollectives()


def exchanged(framework: str) -> None:
    """Exchange objects: of every kind, of unequal sizes, none from some, and one that cannot travel."""
    workers = backend_of(framework).workers
    rank, size = workers.rank, workers.size
    value = {"rank": rank, (1, None): {2.5}, "rows": np.full((rank, 3), rank), "path": Path("a")}
    for other, found in enumerate(workers.allgather_object(value)):
        assert list(found) == list(value)
        assert found["rank"] == other
        assert found["rows"].shape == (other, 3)
        assert (found["rows"] == other).all()
    large = np.arange(1_000_000 * rank, dtype=np.float64)
    assert [len(found) for found in workers.allgather_object(large)] == [1_000_000 * r for r in range(size)]
    for root in range(size):
        assert workers.broadcast_object(("from", rank), root) == ("from", root)
    for root in (None, size - 1):
        foreign = object() if rank == size - 1 else "x"
        with pytest.raises(ExchangeError, match=rf"an object is a builtins.object \(on rank {size - 1}\)"):
            workers.allgather_object(foreign) if root is None else workers.broadcast_object(foreign, root)
    workers.barrier()


def pickles_sent(framework: str) -> list[str]:
    """Have the last worker send pickles in place of what the others exchange; return what they raise."""
    workers = backend_of(framework).workers
    bare = pickle.dumps(Executed())
    payloads = [bare, struct.pack("<i?Q", GATHER, False, len(bare)) + bare]
    found = []
    for payload in payloads:
        if workers.rank == workers.size - 1:
            collectives_of(framework).join(np.frombuffer(bytearray(payload), np.uint8))
            continue
        try:
            workers.allgather_object("fine")
        except ExchangeError as error:
            found.append(error.problem)
    workers.barrier()
    assert not Path("executed").exists()
    return found
