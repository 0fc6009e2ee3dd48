"""The workers through a Horovod binding, and how the failure of a collective is recognised."""

from types import SimpleNamespace

import pytest

from hvdtrain.backends.workers import HorovodWorkers, first_line, peer_errors
from hvdtrain.errors import EnvironmentFault, PeerLostError


class HorovodInternalError(RuntimeError):
    """Stands in for Horovod's own, which the torch binding raises."""


def binding(size: int = 1, mpi: bool = False, **changes: object) -> SimpleNamespace:
    """Give what HorovodWorkers uses of ``horovod.torch``."""
    values = {
        "rank": lambda: 0,
        "size": lambda: size,
        "local_rank": lambda: 0,
        "local_size": lambda: size,
        "mpi_enabled": lambda: mpi,
        "allgather_object": lambda value, name: [value] * size,
        "broadcast_object": lambda value, root_rank, name: value,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("size", "mpi", "controller"),
    [(1, True, "none"), (1, False, "none"), (2, True, "MPI"), (2, False, "Gloo")],
)
def test_the_controller_is_named(size, mpi, controller):
    assert HorovodWorkers(binding(size, mpi)).controller == controller


def test_one_worker_asks_nobody():
    workers = HorovodWorkers(binding(1, allgather_object=None, broadcast_object=None))
    assert workers.allgather_object("x") == ["x"]
    assert workers.broadcast_object("x") == "x"
    workers.barrier()


def test_processes_that_horovod_does_not_see_are_an_error(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(EnvironmentFault, match="mpirun started 4 processes"):
        HorovodWorkers(binding(1))
    assert HorovodWorkers(binding(4)).size == 4


@pytest.mark.parametrize(
    "error",
    [
        HorovodInternalError("broken"),
        type("Aborted", (HorovodInternalError,), {})("broken"),
        RuntimeError("\n  Horovod has been shut down. Exiting."),
        ValueError("node allreduce: [gloo/transport/tcp/pair.cc:446] Connection reset by peer"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("method", ["allgather_object", "broadcast_object", "barrier"])
def test_a_collective_that_fails_is_a_lost_peer(method, error):
    def fail(*_: object, **__: object) -> None:
        raise error

    workers = HorovodWorkers(binding(2, allgather_object=fail, broadcast_object=fail))
    with pytest.raises(PeerLostError, match="because another worker ended") as caught:
        getattr(workers, method)(*([] if method == "barrier" else ["x"]))
    assert caught.value.__cause__ is error
    assert caught.value.remedy == str(error).strip()


@pytest.mark.parametrize("error", [ValueError("shapes differ"), KeyboardInterrupt("HorovodInternalError")])
def test_other_errors_pass_through(error):
    with pytest.raises(type(error)) as caught, peer_errors():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("text", "line"), [("\n\n  first \nsecond", "first"), ("", "ValueError"), ("one", "one")]
)
def test_the_first_line_of_an_error(text, line):
    assert first_line(ValueError(text)) == line
