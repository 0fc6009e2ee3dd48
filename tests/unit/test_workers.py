"""The workers through a Horovod binding, and how the failure of a collective is recognised."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.backends import workers as workers_module
from hvdtrain.backends.workers import GATHER, HorovodWorkers, packed, peer_errors
from hvdtrain.errors import EnvironmentFault, ExchangeError, PeerLostError, TrainingError
from hvdtrain.workers import wire
from hvdtrain.workers.world import World


class HorovodInternalError(RuntimeError):
    """Stands in for Horovod's own, which the torch binding raises."""


def world(rank: int, size: int, **changes: object) -> World:
    values = {"generation": 1, "cross_rank": 0, "cross_size": 1, "host": "h", "store": ("127.0.0.1", 1)}
    values |= {"local_rank": rank, "local_size": size, "one_host": True, "salt": "s"}
    return World(rank=rank, size=size, **{**values, **changes})


class Horovod:
    """A binding whose rank and size are those of the world entered last; ``fails`` is what init raises."""

    def __init__(self, size=1, rank=0, fails=None):
        self.calls, self.world, self.fails = [], world(rank, size), fails
        self.mpi_enabled = lambda: False

    def __getattr__(self, name):
        return lambda: getattr(self.world, name)

    def init(self):
        self.calls.append("init")
        if self.fails:
            raise self.fails

    def shutdown(self):
        self.calls.append("shutdown")


class Collectives:
    """Joins what this worker sends with what the others would send: bytes, or a function of the own ones."""

    def __init__(self, *others):
        self.others = others

    def is_under_way(self):
        return False

    def join(self, data, name="hvdtrain.objects"):
        own = data.tobytes()
        parts = [other(own) if callable(other) else other for other in self.others]
        return np.frombuffer(own + b"".join(parts), np.uint8)


@pytest.mark.parametrize(("own", "other", "may_go_on"), [(0, 0, True), (0, 1, False), (1, 0, False)])
def test_workers_that_failed_go_on_if_none_has_an_operation_under_way(own, other, may_go_on, monkeypatch):
    monkeypatch.setattr(Collectives, "is_under_way", lambda self: bool(own))
    assert two_workers(bytes([other])).have_failed() == may_go_on
    assert HorovodWorkers(Horovod(1), Collectives()).have_failed()


def two_workers(*others) -> HorovodWorkers:
    return HorovodWorkers(Horovod(1 + len(others)), Collectives(*others))


def test_processes_that_horovod_does_not_see_are_an_error(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(EnvironmentFault, match="mpirun started 4 processes"):
        HorovodWorkers(Horovod(1), Collectives())
    assert HorovodWorkers(Horovod(4), Collectives()).size == 4


@pytest.mark.parametrize(
    "error",
    [
        HorovodInternalError("\n  broken"),
        RuntimeError("\n  Horovod has been shut down. Exiting."),
        ValueError("node allreduce: [gloo/transport/tcp/pair.cc:446] Connection reset by peer"),
    ],
    ids=repr,
)
def test_a_collective_that_fails_is_a_lost_peer(error):
    def fail(*_: object, **__: object) -> None:
        raise error

    workers = two_workers(fail)
    with pytest.raises(PeerLostError, match="because another worker ended") as caught:
        workers.barrier()
    assert caught.value.__cause__ is error
    assert caught.value.remedy == str(error).strip()


@pytest.mark.parametrize(
    "text",
    [
        "Mismatched data types: One rank had type float32, but another rank had type float64.",
        "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that "
        "is currently being processed.  If you want to request another tensor, use a different tensor name.",
    ],
)
def test_operations_that_do_not_match_are_no_lost_peer(text):
    error = HorovodInternalError(text)
    with pytest.raises(TrainingError, match="collective operations do not match: ") as caught, peer_errors():
        raise error
    assert text in caught.value.problem
    assert "depends on the rank" in caught.value.remedy


def elastic_workers(hvd: Horovod, *others) -> HorovodWorkers:
    def enter(entered: World) -> None:
        hvd.calls.append("enter")
        hvd.world = entered

    return HorovodWorkers(
        hvd, Collectives(*others), SimpleNamespace(slot=3, slots_on_host=4, least=1, most=7, enter=enter)
    )


def test_a_worker_takes_rank_and_size_of_each_world_anew():
    hvd = Horovod()
    workers = elastic_workers(hvd, packed(GATHER, "other"))
    assert (workers.is_elastic, workers.may_reduce, workers.most, workers.size) == (True, True, 7, 1)
    assert (workers.local_rank, workers.local_size) == (3, 4)  # which choose GPU and threads
    workers.restart(world(0, 2, local_size=1))
    assert hvd.calls == ["shutdown", "enter", "init"]
    assert (workers.rank, workers.size, workers.local_size, workers.controller) == (0, 2, 1, "Gloo")
    assert workers.allgather_object({"own"}) == [{"own"}, "other"]
    workers.restart(world(2, 3, local_rank=1))
    assert (workers.rank, workers.size, workers.local_rank, workers.local_size) == (2, 3, 1, 3)
    workers.restart(world(0, 1))
    assert (workers.controller, workers.allgather_object("own")) == ("none", ["own"])


def test_a_world_that_does_not_come_up_has_lost_a_worker():
    failure = "Horovod initialization failed: [/a/b.cc:12] Horovod collectives aborted: x"
    with pytest.raises(PeerLostError, match="could not connect the 3 workers") as caught:
        elastic_workers(Horovod(fails=ValueError(failure))).restart(world(1, 3))
    assert caught.value.remedy == "Horovod initialization failed: Horovod collectives aborted: x"


@pytest.mark.parametrize("broken", [False, True])
def test_only_a_broken_world_is_left_by_giving_up_what_is_under_way(broken, monkeypatch):
    hvd = Horovod()
    monkeypatch.setattr(workers_module, "abort_collectives", lambda why: hvd.calls.append("abort"))
    elastic_workers(hvd).leave(broken=broken)
    assert hvd.calls == (["abort"] if broken else []) + ["shutdown"]


def test_a_broadcast_gives_the_value_of_its_root_and_no_other():
    value = SimpleNamespace()  # of no type that travels, as long as it need not
    workers = two_workers(packed(1, [1.5]))
    assert workers.broadcast_object(value, root=1) == [1.5]
    workers = two_workers(packed(0, None))
    assert workers.broadcast_object((1, 2)) == (1, 2)


def test_a_worker_whose_object_cannot_travel_tells_the_others():
    sent: list[bytes] = []
    workers = two_workers(lambda own: sent.append(own) or packed(GATHER, None))
    with pytest.raises(ExchangeError, match=r"a builtins.function \(on rank 0\)") as raised_there:
        workers.allgather_object([world])
    joined = SimpleNamespace(join=lambda data: np.frombuffer(sent[0] + data.tobytes(), np.uint8))
    other = HorovodWorkers(Horovod(2, rank=1), joined)
    with pytest.raises(ExchangeError) as raised_here:
        other.allgather_object("fine")
    assert vars(raised_here.value) == vars(raised_there.value)
    assert raised_here.value.everywhere


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (packed(GATHER, 1) * 2, "bytes too many"),
        (packed(GATHER, 1)[:-1], "from rank 1 .* a message of"),
        (packed(0, 1), "a broadcast from rank 0 where this worker has a gathering of objects"),
        (
            struct.pack("<Q", len(message := wire.encode("x"))) + message,
            "another message where this worker has",
        ),
    ],
    ids=["two", "a part", "a broadcast", "another form"],
)
def test_what_no_worker_sends_is_refused(sent, found):
    with pytest.raises(ExchangeError, match=found):
        two_workers(sent).allgather_object(1)
