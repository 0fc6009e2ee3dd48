"""The programs that bench compares with: what they have of the environment, and what disturbed them."""

import itertools
import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from hvdtrain.bench import peer
from hvdtrain.bench.machine import CpuTimes
from hvdtrain.bench.peer import Place, prepare_peer, run_steps
from hvdtrain.config import Layer
from hvdtrain.host import environment

LAUNCHED = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2"}
LAYERS = [Layer("test", {"framework": "torch", "profile": "3-4"})]


@pytest.fixture
def launched(monkeypatch):
    for name, value in (LAUNCHED | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)


def test_another_program_has_horovods_defaults(launched):
    ours = set(environment.prepare(dict(os.environ)))
    assert {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_GLOO_TIMEOUT_SECONDS"} <= ours
    prepare_peer(LAYERS)
    assert not ours & os.environ.keys()


def test_another_program_has_what_the_user_has_set(launched, monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1048576")
    prepare_peer(LAYERS)
    assert os.environ["HOROVOD_FUSION_THRESHOLD"] == "1048576"


@pytest.mark.parametrize(("mean_seconds", "is_said"), [(4.0, True), (10.0, False)])
def test_what_else_ran_beside_another_program_is_said(mean_seconds, is_said, monkeypatch):
    moments = iter([CpuTimes("h1", 2, 0.0, 0.0, 0.0, 0.0), CpuTimes("h1", 2, 10.0, 20.0, 0.0, 1.0)])
    monkeypatch.setattr(peer.CpuTimes, "now", lambda _: next(moments))

    @contextmanager
    def batches():
        yield itertools.count()

    done = []
    program = SimpleNamespace(config=SimpleNamespace(seed=0), place=Place(0, 2), batches=batches)
    # the second number whose mean is taken is the processes' CPU seconds
    means = iter([2.3, mean_seconds])
    found = run_steps(program, done.append, lambda _: 2.3, lambda _: next(means), 40)
    assert (found["first_loss"], found["steps_timed"]) == (2.3, 40)
    assert len(done) == 1 + 20 + 40
    assert [text[:11] for text in found["warnings"]] == ["h1 was busy"] * is_said
