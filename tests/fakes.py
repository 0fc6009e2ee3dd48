"""Stand-ins that need no framework and no launcher: workers as threads, a backend without tensors."""

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from hvdtrain.config import Config
from hvdtrain.data.datasets import ArrayDataset
from hvdtrain.errors import TaskError
from hvdtrain.session import Session

_ANSWER_SECONDS = 20


class FakeWorkers:
    """One of several workers that are threads of this process.

    Objects travel pickled, as they do between real workers.
    """

    controller = "MPI"

    def __init__(
        self, rank: int, hosts: Sequence[str], barrier: threading.Barrier, slots: list[bytes]
    ) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.host = hosts[rank]
        self.local_rank = list(hosts[:rank]).count(self.host)
        self.local_size = list(hosts).count(self.host)
        self.sent: list[bytes] = []
        self._barrier = barrier
        self._slots = slots

    def allgather_object(self, value: Any) -> list[Any]:
        self._slots[self.rank] = pickle.dumps(value)
        self.sent.append(self._slots[self.rank])
        self._barrier.wait(_ANSWER_SECONDS)
        gathered = [pickle.loads(slot) for slot in self._slots]
        self._barrier.wait(_ANSWER_SECONDS)
        return gathered

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self.allgather_object(value if self.rank == root else None)[root]

    def barrier(self) -> None:
        self.allgather_object(None)


def on_every_rank(hosts: Sequence[str], work: Callable[[FakeWorkers], Any]) -> list[Any]:
    """Run ``work(workers)`` on one thread per host named; give what each returned or raised, by rank."""
    barrier, slots = threading.Barrier(len(hosts)), [b""] * len(hosts)
    outcomes: list[Any] = [None] * len(hosts)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(FakeWorkers(rank, hosts, barrier, slots))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def one_worker() -> FakeWorkers:
    return FakeWorkers(0, ["here"], threading.Barrier(1), [b""])


class FakeBackend:
    """A backend that holds arrays, gives and takes them, and describes itself; it does not train."""

    def __init__(self, workers: Any, parameters: dict[str, np.ndarray]) -> None:
        self.workers = workers
        self._parameters = parameters

    def describe(self) -> str:
        return "Abacus 1.0 on the desk"

    def versions(self) -> dict[str, str]:
        return {"Abacus": "1.0"}

    def get_state(self) -> dict[str, np.ndarray]:
        return {name: array.copy() for name, array in self._parameters.items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        shapes = [{name: array.shape for name, array in one.items()} for one in (self._parameters, state)]
        if shapes[0] != shapes[1]:
            raise TaskError("the state does not fit the model: misshapen")
        self._parameters = {name: state[name].copy() for name in self._parameters}

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from self._parameters.items()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self._parameters.items()}

    def batch_norm_layers(self) -> int:
        return 0


def dataset(size: int) -> ArrayDataset:
    """Give ``size`` samples whose inputs tell their index."""
    return ArrayDataset({"inputs": np.arange(size, dtype=np.float32)[:, None], "targets": np.arange(size)})


def make_session(
    run_dir: Any, workers: Any = None, train_size: int = 100, eval_size: int = 0, **fields: Any
) -> Session:
    """Give a session over fakes: real config, real data, no framework and no report."""
    parameters = {"model/a/kernel": np.ones((3, 4), np.float32), "model/a/bias": np.zeros(4, np.float32)}
    return Session(
        config=Config(**{"framework": "torch", "epochs": 1, **fields}),
        backend=FakeBackend(workers or one_worker(), parameters),
        train_data=dataset(train_size),
        eval_data=dataset(eval_size) if eval_size else None,
        report=SimpleNamespace(),
        run_dir=run_dir,
    )
