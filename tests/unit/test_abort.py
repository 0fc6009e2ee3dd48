"""Giving up collectives from another thread: in whichever binding is loaded."""

import sys
from types import SimpleNamespace

import pytest

from hvdtrain.backends.start import start_horovod
from hvdtrain.backends.workers import abort_collectives, check_abort
from hvdtrain.errors import HorovodBuildError


@pytest.fixture(params=["torch", "tensorflow"])
def load(request, monkeypatch):
    """Give a function that lets a library be the one of a binding that this process has loaded."""

    def loaded(library: object) -> None:
        for framework in ("torch", "tensorflow"):
            monkeypatch.delitem(sys.modules, f"horovod.{framework}.mpi_ops", raising=False)
        module = SimpleNamespace(_basics=SimpleNamespace(MPI_LIB_CTYPES=library))
        monkeypatch.setitem(sys.modules, f"horovod.{request.param}.mpi_ops", module)

    return loaded


def test_the_library_is_told_why(load):
    reasons: list[bytes] = []
    load(SimpleNamespace(horovod_abort=reasons.append))
    abort_collectives("rank 2 on h\udc80st was killed")
    assert reasons == [b"rank 2 on h?st was killed"]
    abort_collectives("x" * 5000)
    assert len(reasons[-1]) == 400


def test_a_horovod_that_cannot_is_an_error_before_training(load):
    load(SimpleNamespace())
    for call in (
        check_abort,
        lambda: abort_collectives("x"),
        lambda: start_horovod(None, None, SimpleNamespace()),
    ):
        with pytest.raises(HorovodBuildError, match="cannot give up collectives") as caught:
            call()
        assert "build-horovod --force" in caught.value.remedy
