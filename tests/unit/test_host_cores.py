"""The number of compute threads of a worker."""

import os
from types import SimpleNamespace

import psutil
import pytest

from hvdtrain.host import cores as cores_module
from hvdtrain.host.cores import threads_per_worker


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def cores(monkeypatch):
    """Sets the cores of this process and of the launcher that started it."""

    def set_cores(own: int, launcher: int | None) -> None:
        def affinity() -> list[int]:
            if launcher is None:
                raise psutil.AccessDenied
            return list(range(launcher))

        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(own)))
        monkeypatch.setattr(
            cores_module.psutil, "Process", lambda pid: SimpleNamespace(cpu_affinity=affinity)
        )

    return set_cores


@pytest.mark.parametrize(
    ("own", "launcher", "local_size", "expected"),
    [
        (16, 16, 1, 16),
        (16, 16, 4, 4),
        (16, 16, 5, 3),
        (2, 2, 4, 1),  # more workers than cores
        (4, 16, 4, 4),  # bound to a quarter each
        (1, 16, 4, 1),  # bound to a core
        (4, 16, 2, 4),  # bound to less than the share
    ],
)
def test_a_worker_gets_its_share_of_the_cores(cores, own, launcher, local_size, expected):
    cores(own, launcher)
    assert threads_per_worker(local_size) == expected


def test_what_the_user_set_takes_precedence(cores, monkeypatch):
    cores(8, 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_worker(2) == 3
