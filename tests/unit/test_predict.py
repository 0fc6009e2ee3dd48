"""The formulas of docs/scaling.md: cases computed by hand, and what holds for all numbers."""

import math
from dataclasses import replace

import pytest
from click import BadParameter
from hypothesis import given, settings
from hypothesis import strategies as st
from support.predictions import DOCUMENT, FAST, MEASURED, MIB, SHAPES, SIZE, of_three, sure

from hvdtrain.config import Config
from hvdtrain.tools.bench.forecast import (
    Cluster,
    Measured,
    counts_for,
    explained,
    forecast,
    parts_of,
    waiting_growth,
)
from hvdtrain.tools.bench.options import Link, parse_link
from hvdtrain.tools.message_times import buffers, local_steps, low_rank, way_of
from hvdtrain.tools.spread import Spread


def test_waiting_grows_as_the_largest_of_normal_numbers_does():
    # expected largest of 2 and of 16 normal numbers, from tables: 0.5642 and 1.7660
    growth = waiting_growth(2, 16)
    assert growth.median == pytest.approx(1.7660 / 0.5642, rel=0.06)
    assert growth.low == 1, "the worker may be slower for good"
    assert growth.high == pytest.approx(sum(1 / k for k in range(2, 17)) / 0.5)
    assert waiting_growth(8, 8) == sure(1.0)
    assert waiting_growth(8, 4).high == 1


def test_links_are_read():
    assert parse_link("200Mbit").bits_per_second == 2e8
    found = parse_link("10gbit/s/0.5ms")
    assert (found.bits_per_second, found.latency.median) == (1e10, pytest.approx(0.5e-3))
    for text in ("", "fast", "0gbit", "1gb", "1gbit/5", "1gbit/60s", "1gbit/0us"):
        with pytest.raises(BadParameter, match="is not a link such as 1gbit"):
            parse_link(text)


@pytest.mark.parametrize("controller", ["Gloo", "MPI"])
def test_bytes_on_a_link_take_their_bits_and_headers(controller):
    # 6.3 M numbers over 1 GbE: 215 ms at 2 workers and 404 ms at 16
    way = replace(MEASURED.way, sizes=(4 * 6_300_000,))
    measured = replace(MEASURED, way=way, controller=controller, byte=sure(0.0))
    for workers, seconds in ((2, 0.215), (16, 0.404)):
        found = parts_of(measured, Cluster(workers, 1, Link("1gbit", 1e9))).transfer
        assert found == pytest.approx(seconds, rel=0.03)
    two = Cluster(2, 1, Link("1gbit", 1e9))
    low, high = (parts_of(measured, two, end).transfer for end in ("low", "high"))
    assert low < parts_of(measured, two).transfer < high


def test_messages_of_each_way_have_their_bytes():
    config = Config(framework="torch", momentum=0.9)
    assert way_of(config, SHAPES, on_gpu=False) == buffers(SHAPES)
    assert buffers(SHAPES).sizes == (SIZE,)
    half = way_of(config.model_copy(update={"compression": "fp16"}), SHAPES, on_gpu=False)
    assert (half.name, half.sizes, half.small) == ("fp16", (SIZE // 2,), 1)
    powersgd = way_of(config.model_copy(update={"compression": "powersgd:4"}), SHAPES, on_gpu=False)
    assert powersgd.sizes == (4 * (1024 * 4 + 1024), 4 * 1024 * 4)
    assert (powersgd.name, powersgd.agreements, powersgd.small) == ("powersgd:4", 2, 0)
    assert (low_rank([(8,)], 4).sizes, low_rank([(8,)], 4).agreements) == ((32,), 1)
    local = way_of(config.model_copy(update={"sync_every": 10}), SHAPES, on_gpu=False)
    assert local == local_steps(SHAPES, 10, 1)
    assert (sum(local.sizes), len(local.sizes), local.agreements, local.every) == (2 * SIZE, 1, 2, 10)
    assert buffers([(512, 1024)] * 8, on_gpu=True).sizes == (2 * MIB,) * 8


def test_a_sum_takes_a_latency_and_a_time_for_each_byte():
    assert MEASURED.byte.median == pytest.approx(1e-3 / MIB)
    sums = [{"bytes": size, "horovod_seconds": of_three(1 / size)} for size in (4096, MIB)]
    assert Measured.of({**DOCUMENT, "all_reduce": sums}).byte == sure(0.0), "noise makes no bytes faster"
    parts = explained(MEASURED)
    assert parts.latency == pytest.approx(1e-3)
    assert parts.transfer == pytest.approx(SIZE / MIB * 1e-3)
    here = parts_of(MEASURED, Cluster(2, 2))
    assert (here.step, here.slowest) == (pytest.approx(30e-3), pytest.approx(0.5e-3))
    assert here.rest == pytest.approx(30e-3 - parts.step), "what was measured"


HOP = 0.5 * 1e-3 / 5  # half of the smallest sum is that of 1.5 agreements and a sum, of two hops each
LINK = parse_link("10gbit/1ms")


@pytest.mark.parametrize(("slots", "share"), [(1, 1.0), (8, 2 / 16)])
def test_of_a_ring_the_hops_within_hosts_are_local(slots, share):
    small = replace(MEASURED, way=replace(MEASURED.way, sizes=(4096,)))
    parts = parts_of(small, Cluster(16, slots, LINK))
    hop = share * 1e-3 + (1 - share) * HOP
    assert parts.latency == pytest.approx(1e-3 - 5 * HOP + 2.5 * 30 * hop)


def test_a_large_message_is_summed_within_hosts_and_then_between_them():
    agreement = replace(MEASURED, way=replace(MEASURED.way, sizes=()))
    clusters = [Cluster(16, slots, LINK) for slots in (8, 1)]
    few, many = (parts_of(MEASURED, one).latency - parts_of(agreement, one).latency for one in clusters)
    assert few == pytest.approx(2 * 7 * HOP + 2 * 1e-3)
    assert many == pytest.approx(30 * 1e-3)
    inside, outside = 2 * 7 / 8 * SIZE / MIB * 1e-3, SIZE * 8 / 1e10 / 0.95
    copied = SIZE / MIB * 1e-3 / 8
    found = parts_of(MEASURED, clusters[0]).transfer
    assert found == pytest.approx(inside + max(copied, outside) + min(copied, outside) / 2)
    on_gpu = replace(MEASURED, on_gpu=True, controller="MPI", byte=sure(0.0))
    alone = 1.5 * SIZE * 8 / 1e10 / 0.95
    assert parts_of(on_gpu, Cluster(4, 1, FAST)).transfer == pytest.approx(alone), "NCCL moves the bytes"


def test_of_a_tree_few_hops_follow_one_another_and_slow_ones_of_a_measured_network_show():
    measured = replace(MEASURED, controller="MPI", way=replace(MEASURED.way, sizes=(4096,)))
    found = parts_of(measured, Cluster(512, 1, LINK), "low")
    assert found.latency == pytest.approx(1e-3 + 9e-3 + 18e-3), "at the low end hops of a host take nothing"
    few, many = (parts_of(measured, Cluster(16, n, LINK)).latency for n in (8, 1))
    assert few < many
    measured = replace(MEASURED, workers=8, hosts=2, slots=4, controller="MPI")
    agreement = replace(measured, way=replace(MEASURED.way, sizes=()))
    few, many = (parts_of(agreement, Cluster(count, 4)).latency for count in (8, 512))
    hop = 0.5 * 1e-3 / (1.5 * 1 + math.sqrt(2 * 14 / 4))
    assert many - few == pytest.approx(1.5 * 6 * hop), "128 hosts are reached in seven hops, not one"


def test_between_hosts_messages_are_sent_during_the_backward_pass():
    way = buffers([(512, 1024)] * 4)
    assert (way.sizes, way.early) == ((8 * MIB,), (2 * MIB,) * 4)
    assert not buffers([(512, 512)]).early
    assert not buffers([(512, 1024)] * 4, overlap="false").early
    assert buffers([(512, 1024)] * 4, overlap="true").sizes == way.early
    measured = replace(MEASURED, way=way)
    assert not parts_of(measured, Cluster(2, 2)).overlap
    slow, fast = (parts_of(measured, Cluster(2, 1, Link("any", bits))) for bits in (1e9, 1e12))
    assert slow.overlap == pytest.approx(-0.6 * 20e-3), "three fifths of computing"
    assert fast.overlap == pytest.approx(-0.75 * (fast.latency + fast.transfer)), "all but the last message"
    twice = replace(measured, way=replace(way, passes=2))
    assert parts_of(twice, Cluster(2, 1, Link("1gbit", 1e9))).overlap == pytest.approx(-0.3 * 20e-3)


def test_a_step_between_two_hosts_takes_what_was_measured():
    """benchmarks/README.md, between hosts: alone 55, 25 and 191 ms, link 237, 200 and 318 ms."""
    measured = ((55e-3, 237e-3, 266e-3), (25e-3, 200e-3, 220e-3), (191e-3, 318e-3, 422e-3))
    for compute, seconds, measured_seconds in measured:
        size = int(seconds * 1e9 / 8 * 0.95)
        way = buffers([(size // 32,)] * 8)
        job = replace(
            MEASURED, way=way, data=sure(0.0), compute=sure(compute), slowest=sure(0.0), byte=sure(0.0),
            smallest=sure(1e-4), step=sure(compute),
        )  # fmt: skip
        found = forecast(job, Cluster(2, 1, parse_link("1gbit"))).step
        assert found.median == pytest.approx(measured_seconds, rel=0.1)
        assert found.low <= measured_seconds <= found.high


def test_numbers_of_workers_are_powers_of_two_and_all_slots():
    assert counts_for(None, 2, measured_network=False) == [2, 4, 8, 16, 32, 64]
    assert counts_for(3, 6, measured_network=False) == [2, 4, 8, 16, 18]
    assert counts_for(1, 1, measured_network=False) == []
    assert counts_for(4, 4, measured_network=True) == [8, 16]


LINKS = st.floats(1e6, 1e12).map(lambda bits: Link("any", bits))
COUNTS = st.integers(1, 10).map(lambda power: 1 << power)
CLUSTERS = st.builds(Cluster, COUNTS, st.integers(1, 16), LINKS)
JOBS = st.builds(
    lambda step, slowest, controller, way: replace(
        MEASURED, controller=controller, way=way,
        step=Spread(step, 0.9 * step, 1.2 * step), compute=Spread(20e-3, 19e-3, 22e-3),
        slowest=Spread(slowest, 0.5 * slowest, 2 * slowest), smallest=Spread(1e-3, 0.8e-3, 1.5e-3),
    ),
    st.floats(15e-3, 0.1), st.floats(0, 5e-3), st.sampled_from(["MPI", "Gloo"]),
    st.sampled_from(
        [buffers(SHAPES), buffers(SHAPES, "fp16"), low_rank(SHAPES, 4), local_steps(SHAPES, 9, 2)]
    ),
)  # fmt: skip


@settings(deadline=None)
@given(JOBS, CLUSTERS)
def test_predictions_lie_in_their_ranges(measured, cluster):
    found = forecast(measured, cluster)
    for one in (found.step, found.speed, found.efficiency):
        assert 0 < one.low <= one.median <= one.high
    assert found.efficiency.high <= 1
    found = forecast(measured, Cluster(2, 2))  # as was measured
    assert found.step.low <= measured.step.median * (1 + 1e-9)
    assert found.step.high >= measured.step.high * (1 - 1e-9)


@settings(deadline=None)
@given(JOBS, COUNTS, LINKS, st.floats(1, 100))
def test_neither_more_workers_nor_a_slower_link_make_a_step_shorter(measured, workers, link, factor):
    step = parts_of(measured, Cluster(workers, 1, link)).step
    quick = replace(link, bits_per_second=factor * link.bits_per_second)
    assert parts_of(measured, Cluster(workers, 1, quick)).step <= step * (1 + 1e-6)
    assert parts_of(measured, Cluster(2 * workers, 1, link)).step >= step * (1 - 1e-6)
