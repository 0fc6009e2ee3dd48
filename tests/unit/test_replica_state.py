"""State that no optimizer updates: combined as it should be, left alone, or found to have drifted."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.fakes import on_every_rank

from hvdtrain.backends.base import check_replicas
from hvdtrain.backends.replica_state import ReplicaState, StateTensor
from hvdtrain.backends.trained_set import follow_trained
from hvdtrain.config import Config
from hvdtrain.errors import ReplicaDriftError, TaskError


class Collectives:
    """Moves bytes between fake workers."""

    def __init__(self, workers):
        self.workers = workers

    def join(self, data, name=""):
        return np.frombuffer(b"".join(self.workers.allgather_object(data.tobytes())), np.uint8)

    def sum(self, vector):
        return self.join(vector.view(np.uint8)).view(np.float64).reshape(self.workers.size, -1).sum(0)


class Array(StateTensor):
    """An array; ``stamps`` gives its stamp."""

    def __init__(self, name, array, default="", stamps=lambda: None):
        super().__init__(name, default, array)
        self.stamps, self.reads = stamps, 0

    def read(self):
        self.reads += 1
        return np.frombuffer(self.held.tobytes(), np.uint8)

    def write(self, data):
        self.held.reshape(-1)[:] = np.frombuffer(data, self.held.dtype)

    def numbers(self):
        return self.held.astype(np.float64).reshape(-1)

    def assign(self, numbers):
        self.held.reshape(-1)[:] = numbers

    def stamp(self):
        return self.stamps()


def replicas(work, size=3, **reductions):
    """Give ``work`` a worker's rank, its arrays and its ReplicaState; return what it returns, by rank."""

    def on_rank(workers):
        arrays = {
            "norm/mean": np.zeros(2, np.float32),
            "queue": np.zeros((2, 2), np.float32),
            "seen": np.full(1, 5, np.int64),
            "table": np.full(3, 0.1, np.float32),
        }
        tensors = [Array(n, a, "mean" if n == "norm/mean" else "") for n, a in arrays.items()]
        task = SimpleNamespace(state_reductions=reductions)
        state = ReplicaState(task, workers, Collectives(workers), lambda: tensors)
        state.checksums()
        state.tensors = tensors
        return work(workers, arrays, state)

    return on_every_rank(["here"] * size, on_rank)


def test_what_changes_on_all_workers_is_combined_and_what_one_changes_is_left_for_the_check():
    def work(workers, arrays, state):
        arrays["queue"] += workers.rank + 1
        if workers.rank == 1:
            arrays["table"][0] = 9
        assert (state.combine(), arrays["queue"][0, 0]) == (["model/queue"], 1)
        assert state.combine() == []
        backend = SimpleNamespace(workers=workers, replica_state=state, parameter_checksums=state.checksums)
        check_replicas(backend)

    for error in replicas(work):
        assert isinstance(error, ReplicaDriftError), error
        assert error.everywhere
        assert "rank 1 (here) drifted from the others, first in model/table" in error.problem


def test_state_that_one_worker_has_no_more_is_left_as_it_is():
    def work(workers, arrays, state):
        state.expect(workers.allgather_object({"model/queue": 1, "model/table": 1}))
        for name in ("norm/mean", "queue", "table"):
            arrays[name] += workers.rank
        if workers.rank == 1:
            del state.tensors[1]
        state.combine()
        return arrays

    for rank, arrays in enumerate(replicas(work)):
        assert (arrays["queue"] == rank).all()
        assert (arrays["table"] == np.float32(0.1)).all()
        assert (arrays["norm/mean"] == 1).all()


def test_frozen_weights_are_read_only_once_something_has_written_to_them():
    def work(workers, arrays, state):
        written, weight = [0], np.ones(2, np.float32)
        frozen = Array("frozen", weight, stamps=lambda: written[0])
        state.tensors.append(frozen)
        state.checksums()
        state.combine()
        assert frozen.reads == 1
        weight += workers.rank + 1
        written[0] += 1
        return state.combine(), weight.tolist()

    assert replicas(work) == [(["model/frozen"], [2, 2])] * 3


THAWED, NONE = (("x",), (), ()), ((), (), ())
NAMED = {
    "rank 0 (here) alone thaws x; the other workers did not": [THAWED, NONE, NONE],
    "rank 0 (here) thaws x; rank 2 (here) freezes y": [THAWED, THAWED, ((), ("y",), ())],
}


@pytest.mark.parametrize(("said", "changes"), NAMED.items(), ids=NAMED)
def test_workers_that_freeze_or_thaw_different_parameters_are_named(said, changes):
    def work(workers):
        backend = SimpleNamespace(workers=workers, trained_change=lambda: changes[workers.rank])
        follow_trained(backend, Config(framework="torch", task="t.py:T"), 1)

    for error in on_every_rank(["here"] * 3, work):
        assert isinstance(error, TaskError)
        assert error.problem.startswith(said)


def test_pytorch_shows_what_was_written_to_and_leaves_out_caches_of_another_shape():
    torch = pytest.importorskip("torch")
    from hvdtrain.backends.portable.names import Renaming
    from hvdtrain.backends.torch.replica_state import StateTensors
    from hvdtrain.backends.torch.state.model_state import ModelState

    model = torch.nn.Linear(2, 2).requires_grad_(False)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    tensors = StateTensors(model, ModelState(model, Renaming(SimpleNamespace(), "torch")))
    stamps = lambda: {one.name: one.stamp() for one in tensors()}  # noqa: E731
    before = stamps()
    model(torch.ones(1, 2))
    assert stamps() == before
    assert before["model/cache"] is None
    with torch.no_grad():
        model.weight.mul_(2)
    model.bias.data = model.bias.data * 2
    model.cache.data = torch.zeros(3)
    after = stamps()
    assert after.keys() == {"model/kernel", "model/bias"}
    assert not after.items() & before.items()
