"""What a plan says limits a job, and what would help."""

from dataclasses import replace

import pytest
from support.predictions import FAST, MEASURED, SHAPES, WAYS, sure

from hvdtrain.bench.predict import Cluster
from hvdtrain.bench.predict_advice import Advice, Help, advise
from hvdtrain.bench.predict_curve import Curve
from hvdtrain.bench.predict_link import parse_link
from hvdtrain.bench.predict_ways import low_rank
from hvdtrain.bench.spread import Spread

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
    found = advise(MEASURED, WAYS[0], far, others=[(MEASURED, 0.0), (quick, 0.0)])
    assert found.limit == "latency: small messages one after the other"
    assert "horovodrun --mpi" in [one.name for one in found.helps]
    assert "horovodrun --mpi" not in [one.name for one in advise(MEASURED, WAYS[0], far).helps]
    for errors in ((0.0, 1000.0), (1000.0, 0.0)):
        unsure = advise(MEASURED, WAYS[0], far, others=[(quick, errors[0])], error=errors[1])
        assert "horovodrun --mpi" not in [one.name for one in unsure.helps]


def test_more_accumulation_than_the_job_has_is_advised():
    local = low_rank(SHAPES, 4, sure(0.2))  # no help, so that there is room
    for accumulate, option in ((1, "--accumulate 4,"), (4, "--accumulate 16,")):
        found = advise(replace(MEASURED, accumulate=accumulate, ways=[WAYS[0], local]), WAYS[0], SLOW)
        assert [one.name for one in found.helps if one.name.startswith(option)]


def test_options_that_a_help_displaces_are_named():
    from_local = [one.name for one in advise(MEASURED, WAYS[3], SLOW).helps]
    assert "--compression powersgd:4 in place of --sync-every, which approximates gradients" in from_local
    without_powersgd = replace(MEASURED, ways=[WAYS[0], WAYS[1], WAYS[3]])
    from_fp16 = [one.name for one in advise(without_powersgd, WAYS[1], SLOW).helps]
    assert "--sync-every 10 in place of --compression, which trains differently" in from_fp16
    from_none = [one.name for one in advise(without_powersgd, WAYS[0], SLOW).helps]
    assert "--sync-every 10, which trains differently" in from_none


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


def test_gains_are_said_without_exponents_and_once_if_they_are_equal():
    helps = [Help("a", Spread(9.0, 3.0, 412.0)), Help("b", Spread(1.41, 1.4, 1.42)), Help("c", sure(2e7))]
    text = "\n".join(Advice("latency", 0.9, helps).describe())
    assert "a: 3 to 410 times as fast" in text
    assert "b: 1.4 times as fast" in text
    assert "c: 20,000,000 times as fast" in text
