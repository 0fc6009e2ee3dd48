"""What a plan says limits a job, and what would help."""

from dataclasses import replace

import pytest
from support.predictions import FAST, MEASURED, WAYS, sure

from hvdtrain.bench.predict import Cluster
from hvdtrain.bench.predict_advice import advise
from hvdtrain.bench.predict_curve import Curve
from hvdtrain.bench.predict_link import parse_link

SLOW = Cluster(16, 1, parse_link("100mbit"))


def test_a_slow_link_limits_and_fewer_bytes_help():
    found = advise(MEASURED, WAYS[0], SLOW)
    assert found.limit == "the network's bandwidth"
    assert found.share > 0.8
    names = [one.name for one in found.helps]
    assert len(names) == 3
    assert names[0] == "--compression powersgd:4, which approximates gradients"
    assert found.helps[0].gain.low > 5
    first, second, *_ = found.describe()
    assert first.startswith("limited by the network's bandwidth, 9")
    assert second.startswith("would help most: --compression powersgd:4, which approximates gradients: ")


def test_nothing_is_an_answer():
    curve = Curve([(4096, sure(1e-5)), (2**24, sure(2e-4))])
    idle = replace(
        MEASURED, step=sure(21.3e-3), data=sure(0.0), compute=sure(21e-3), raw=sure(1e-6), curve=curve
    )
    found = advise(idle, WAYS[0], Cluster(4, 4))
    assert (found.limit, found.helps) == ("", ())
    assert len(found.describe()) == 1
    assert found.describe()[0].startswith("limited by nothing")


def test_a_help_must_gain_more_than_the_error():
    found = advise(MEASURED, WAYS[0], SLOW, error=100.0)
    assert found.helps == []
    assert found.describe()[1].startswith("would help most: nothing that is sure")


def test_the_other_controller_is_weighed():
    quick = replace(MEASURED, controller="MPI")
    far = Cluster(512, 1, parse_link("100gbit/1ms"))
    found = advise(MEASURED, WAYS[0], far, others=[MEASURED, quick])
    assert found.limit == "latency: small messages one after the other"
    assert "horovodrun --mpi" not in [one.name for one in advise(MEASURED, WAYS[0], far).helps]


def test_data_and_slow_workers_are_named():
    found = advise(replace(MEASURED, data=sure(0.1), step=sure(0.13)), WAYS[0], Cluster(4, 1, FAST))
    assert found.limit == "waiting for data"
    assert found.helps[0].name.startswith("faster reading")
    only_data = advise(replace(MEASURED, data=sure(0.5), step=sure(0.53)), WAYS[0], Cluster(4, 1, FAST))
    assert only_data.limit == "waiting for data", "although workers wait for nobody"
    noisy = replace(MEASURED, deviations=[-0.1, 0.0, 0.0, 0.3])
    assert advise(noisy, WAYS[0], Cluster(64, 1, FAST)).limit == "waiting for the slowest worker"


@pytest.mark.parametrize("way", WAYS)
def test_a_way_is_not_its_own_help(way):
    assert all(way.name not in one.name for one in advise(MEASURED, way, SLOW).helps)


def test_what_is_hidden_does_not_limit():
    hidden = replace(MEASURED, step=sure(22e-3), data=sure(0.0))
    found = advise(hidden, WAYS[0], Cluster(4, 1, parse_link("1gbit")))
    assert found.limit == "the network's bandwidth"
    assert 0 < found.share < 1
