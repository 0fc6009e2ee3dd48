"""The formulas of docs/scaling.md: cases computed by hand, and what holds for all numbers."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import ROOT
from support.predictions import CURVE, FAST, MEASURED, MIB, SHAPES, WAYS, sure

from hvdtrain.bench.predict import Cluster, Parts, alone_share, explained, parts_of, rest_of
from hvdtrain.bench.predict_curve import (
    AGREEMENTS,
    Curve,
    agreement_hops,
    halving_volume_factor,
    ring_hops,
    sum_hops,
    tree_hops,
    volume_factor,
)
from hvdtrain.bench.predict_forecast import (
    Check,
    check_here,
    check_other,
    counts_for,
    forecast,
    largest_error,
)
from hvdtrain.bench.predict_link import PAYLOAD, SATURATION, USUAL_LATENCY, Link, parse_link
from hvdtrain.bench.predict_waiting import (
    deviations_of,
    drawn_excess,
    exponential_excess,
    lag_of,
    normal_excess,
    wait_for_slowest,
)
from hvdtrain.bench.predict_ways import half, local_steps, low_rank, slots_of, uncompressed
from hvdtrain.bench.spread import Spread


@pytest.mark.parametrize(("workers", "exact"), [(2, 0.5642), (4, 1.0294), (16, 1.7660), (512, 3.0370)])
def test_the_largest_of_normal_numbers_is_that_of_the_tables(workers, exact):
    assert normal_excess(workers) == pytest.approx(exact, rel=0.05)


def test_the_largest_of_exponential_numbers_is_the_harmonic_number():
    assert exponential_excess(1) == 0
    assert exponential_excess(4) == pytest.approx(1 / 2 + 1 / 3 + 1 / 4)


def test_harmonic_numbers_of_many_workers_continue_those_of_few():
    assert exponential_excess(1001) - exponential_excess(1000) == pytest.approx(1 / 1001, rel=1e-3)


def test_the_largest_of_drawn_numbers_is_exact():
    # of two draws from 0 and 3, three in four have a 3
    assert drawn_excess([0.0, 3.0], 2) == pytest.approx(0.75 * 3 - 1.5)
    assert drawn_excess([0.0, 3.0], 1) == pytest.approx(0.0)


def test_one_worker_waits_for_nobody():
    assert wait_for_slowest([0.0, 5.0], 1) == sure(0.0)


def test_local_steps_average_what_delays_them():
    once = wait_for_slowest([-1.0, 0.0, 1.0], 8)
    assert wait_for_slowest([-1.0, 0.0, 1.0], 8, 4) == once.times(0.5)


def test_deviations_are_of_a_worker_and_block():
    assert deviations_of([[[1.0, 3.0], [10.0, 12.0]], [[5.0, 5.0], [7.0, 7.0]]]) == [-1, 1, -1, 1, 0, 0, 0, 0]
    assert lag_of([[[1.0], [3.0]], [[2.0], [6.0]]]) == Spread(1.5, 1.0, 2.0)
    assert lag_of([[[2.0]]]) == sure(0.0)


@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=50),
    st.integers(2, 512),
)
def test_waiting_grows_with_the_workers(deviations, workers):
    deviations = [one - fmean(deviations) for one in deviations]
    less, more = wait_for_slowest(deviations, workers), wait_for_slowest(deviations, 2 * workers)
    assert 0 <= less.low <= less.median <= less.high
    assert more.median >= less.median - 1e-12
    assert more.high >= less.high - 1e-12


@pytest.mark.parametrize(
    ("text", "bits", "latency"),
    [
        ("1gbit", 1e9, USUAL_LATENCY),
        ("200Mbit", 2e8, USUAL_LATENCY),
        ("2.5gbit/s", 2.5e9, USUAL_LATENCY),
        ("10gbit/80us", 1e10, sure(80e-6)),
        ("10gbit/s/0.5ms", 1e10, sure(0.5e-3)),
    ],
)
def test_links_are_read(text, bits, latency):
    found = parse_link(text)
    assert found.bits_per_second == bits
    assert found.latency.median == pytest.approx(latency.median)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "0gbit", "1gb", "-1gbit", "1gbit/", "1gbit/5", "1gbit/60s", "1gbit/0us", "9" * 20 + "gbit"],
)
def test_what_is_no_link_is_refused(text):
    with pytest.raises(ValueError, match="is not a link such as 1gbit"):
        parse_link(text)


def test_a_link_carries_less_than_its_wire():
    wire = 8 * 1e9 / 1e9
    gloo, mpi = (Link("1gbit", 1e9).seconds_for(1e9, controller) for controller in ("Gloo", "MPI"))
    assert gloo.median == pytest.approx(wire / 0.95)
    assert mpi.median == pytest.approx(1.4 * wire / 0.95)
    assert gloo.low < gloo.median < gloo.high


def test_hops_are_those_of_rings_and_trees():
    assert [ring_hops(n) for n in (1, 2, 4, 512)] == [0, 2, 6, 1022]
    assert [tree_hops(n) for n in (1, 2, 3, 4, 512)] == [0, 1, 2, 2, 9]
    assert (agreement_hops(512, "MPI"), agreement_hops(512, "Gloo")) == (9, 1022)
    assert sum_hops(8, is_ring=True) == sure(14)
    assert sum_hops(8, is_ring=False) == Spread(pytest.approx(math.sqrt(6 * 14)), 6, 14)
    assert sum_hops(2, is_ring=False) == sure(2)


def test_the_6_m_mlp_needs_what_speed_of_its_links_says():
    # 6.3 M numbers over 1 GbE: 215 ms at 2 workers and 404 ms at 16, with headers
    for workers, seconds in ((2, 0.215), (16, 0.404)):
        sent = volume_factor(workers) * 4 * 6.3e6
        assert Link("1gbit", 1e9).seconds_for(sent, "Gloo").median == pytest.approx(seconds, rel=0.03)


def test_mpi_sends_more_if_the_hosts_with_a_worker_each_are_no_power_of_two():
    assert [halving_volume_factor(n) for n in (1, 2, 3, 4, 6)] == [0, 1, 3, 1.5, 3.5]
    link = Link("100mbit", 1e8)
    for workers, slots, times in ((3, 1, 3 / (4 / 3)), (4, 1, 1), (6, 2, 1)):
        cluster = Cluster(workers, slots, link)
        gloo, mpi = (
            parts_of(replace(MEASURED, controller=name), MEASURED.ways[0], cluster, "median").transfer
            for name in ("Gloo", "MPI")
        )
        assert mpi / gloo == pytest.approx(1.4 * times, rel=0.1)
        low = parts_of(replace(MEASURED, controller="MPI"), MEASURED.ways[0], cluster, "low").transfer
        assert low < 1.01 * gloo


def test_a_curve_is_followed_between_its_sizes_and_beyond():
    seconds = [CURVE.volume_seconds(size).median for size in (100, 4096, MIB, 16 * MIB, 32 * MIB)]
    assert seconds == pytest.approx([0.0, 0.0, 1e-3, 16e-3, 32e-3])
    assert CURVE.volume_seconds((MIB + 16 * MIB) / 2).median == pytest.approx(8.5e-3)


def test_noise_makes_no_larger_buffer_faster():
    noisy = Curve([(4096, sure(2e-3)), (8192, sure(3e-3)), (16384, sure(1e-3))])
    assert noisy.volume_seconds(16384).median == pytest.approx(1e-3)


def test_messages_of_each_way_have_their_bytes():
    none, fp16, powersgd, local = WAYS
    assert none.sizes == (4 * (1024 * 1024 + 1024),)
    assert fp16.bytes_per_step == none.bytes_per_step / 2
    assert powersgd.sizes == (4 * (1024 * 4 + 1024), 4 * 1024 * 4)
    assert (powersgd.name, powersgd.agreements, powersgd.small) == ("powersgd:4", 2, 0)
    assert local.bytes_per_step == pytest.approx(3 * none.bytes_per_step / 10)
    assert (len(local.sizes), local.agreements) == (1, 2)
    assert (low_rank([(8,)], 4).sizes, low_rank([(8,)], 4).agreements) == ((32,), 1)
    assert [slots_of(*one) for one in (("sgd", 0.0), ("sgd", 0.9), ("lars", 0.9), ("adamw", 0.9))] == [
        0,
        1,
        1,
        2,
    ]


def test_the_measured_number_of_workers_takes_what_was_measured():
    parts = parts_of(MEASURED, WAYS[0], Cluster(2, 2))
    assert parts.step == pytest.approx(30e-3)
    assert parts.rest == pytest.approx(rest_of(MEASURED).median)
    # 1 ms, and 4 MiB + 4 KiB at 1 ms/MiB after the first
    assert explained(MEASURED).agreement == pytest.approx(1e-3)
    assert explained(MEASURED).transfer == pytest.approx(1e-3 + (3 * MIB + 4096) / MIB * 1e-3)


def test_hosts_are_reached_over_their_link():
    parts = parts_of(MEASURED, WAYS[0], Cluster(4, 1, FAST))
    hop = 5e-5  # of the link, and a half of the raw call within the host
    small = 1e-3 - hop * (1.5 * 2 + 2)
    assert parts.agreement == pytest.approx(small + 1.5 * 6 * hop + 6 * hop)
    inside = explained(MEASURED).transfer * 1.5
    outside = 1.5 * WAYS[0].sizes[0] * 8 / 1e10 / 0.95
    assert parts.transfer == pytest.approx(max(inside, outside) + min(inside, outside) / 2)


def test_latency_counts_for_each_hop_of_gloo_and_for_few_of_mpi():
    slow = parse_link("10gbit/1ms")
    gloo = parts_of(MEASURED, WAYS[0], Cluster(512, 1, slow))
    assert gloo.agreement == pytest.approx(1e-3 - 5 * 5e-5 + (1.5 + 1) * 1022 * 1e-3)
    measured = replace(MEASURED, controller="MPI")
    mpi = parts_of(measured, WAYS[0], Cluster(512, 1, slow), "low")
    small = 1e-3 - 1e-4 * (1 * 1 + 2)
    assert mpi.agreement == pytest.approx(small + 9e-3 + 18e-3)


def test_of_a_ring_the_hops_within_hosts_are_local():
    slow = parse_link("10gbit/1ms")
    spread, packed = (parts_of(MEASURED, WAYS[0], Cluster(16, slots, slow)) for slots in (1, 8))
    assert packed.agreement < spread.agreement
    share = 2 / 16
    hop = share * 1e-3 + (1 - share) * 5e-5
    assert packed.agreement == pytest.approx(7.5e-4 + (1.5 + 1) * 30 * hop)


@pytest.mark.parametrize(("hosts", "slots"), [(1, 8), (2, 4), (8, 1), (16, 4)])
def test_hops_of_a_ring_take_as_long_as_in_a_simulated_one(hosts, slots):
    """Each worker passes on what it got; only the first worker of a host gets it from another host."""
    count, local, crossing = hosts * slots, 1e-4, 1e-3
    ready = [0.0] * count
    for _ in range(2 * (count - 1)):
        passed = [crossing if hosts > 1 and place % slots == 0 else local for place in range(count)]
        ready = [max(ready[place], ready[place - 1] + passed[place]) for place in range(count)]
    slow = replace(MEASURED, raw=sure(2 * local))
    link = parse_link("10gbit/1ms")
    found = parts_of(slow, WAYS[0], Cluster(count, slots, link)).agreement
    small = 1e-3 - 5 * local
    assert (found - small) / 2.5 == pytest.approx(max(ready), abs=2 * crossing)


def test_of_a_tree_the_first_hops_are_local():
    slow = parse_link("10gbit/1ms")
    measured = replace(MEASURED, controller="MPI")
    found = parts_of(measured, WAYS[0], Cluster(16, 8, slow), "low").agreement
    tree = 1 * 1e-3 + 3 * 1e-4
    assert found == pytest.approx(1e-3 - 1e-4 * (1 + 2) + tree + 2 * tree)


def test_without_a_raw_call_hops_lie_between_nothing_and_all():
    measured = replace(MEASURED, raw=None, hosts=2, slots=1)
    low, high = (parts_of(measured, WAYS[0], Cluster(64, 1), end).agreement for end in ("low", "high"))
    assert low == pytest.approx(1e-3)
    assert high > 30 * low


BUSY = replace(
    MEASURED,
    step=sure(60e-3),
    data=Spread(1e-3, 0.5e-3, 2e-3),
    lag=Spread(3e-3, 2e-3, 5e-3),
    deviations=(-1e-3, 1e-3),
)


def test_all_parts_of_a_step_are_those_of_the_page():
    """By hand: fp16 with 16 workers on 8 hosts, over 1 Gbit/s without latency, from two workers on one."""
    way = half(SHAPES, encoding=sure(4e-3), summing=sure(6e-3))
    found = parts_of(BUSY, way, Cluster(16, 2, Link("1gbit", 1e9, sure(0.0))))
    numbers, growth, hop = 1024 * 1024 + 1024, (2 * 15 / 16) / (2 * 1 / 2), 5e-5
    assert (found.data, found.compute) == (1e-3, 20e-3)
    # of the three tails, the middle one: two steps that are a millisecond from their mean
    excess = sorted([1e-3 * normal_excess(16), 1e-3 * (1 - 2 * 0.5**16), 1e-3 * exponential_excess(16)])[1]
    assert found.slowest == pytest.approx(3e-3 + excess)
    assert found.encoding == pytest.approx(4e-3 + 6e-3 * growth)
    # the gradients and the metrics are summed, after one agreement
    assert found.agreement == pytest.approx(1e-3 - hop * (1.5 * 2 + 2) + (1.5 + 2) * 30 * hop)
    inside, outside = growth * (1e-3 + (2 * numbers / MIB - 1) * 1e-3), growth * 16 * numbers / 1e9 / 0.95
    assert found.transfer == pytest.approx(outside + inside / 2)
    here = 1e-3 + 1e-3 + (4 * numbers / MIB - 1) * 1e-3
    slowest = 3e-3 + wait_for_slowest(BUSY.deviations, 2).median
    assert found.rest == pytest.approx(60e-3 - 21e-3 - slowest - here)
    assert found.step == pytest.approx(
        found.data
        + found.compute
        + found.slowest
        + found.encoding
        + found.agreement
        + found.transfer
        + found.rest
    )


def test_local_steps_share_what_an_exchange_takes():
    way = replace(local_steps(SHAPES, 10, 2), encoding=sure(4e-3), summing=sure(6e-3))
    once = parts_of(BUSY, replace(way, every=1), Cluster(16, 2, FAST))
    found = parts_of(BUSY, way, Cluster(16, 2, FAST))
    for name in ("encoding", "agreement", "transfer", "rest"):
        assert getattr(found, name) == pytest.approx(getattr(once, name) / 10), name
    assert found.slowest - 3e-3 == pytest.approx((once.slowest - 3e-3) / math.sqrt(10))


@pytest.mark.parametrize("end", ["low", "high"])
def test_ranges_have_every_uncertain_part_at_its_end(end):
    way = half(SHAPES, encoding=Spread(4e-3, 3e-3, 6e-3), summing=Spread(6e-3, 5e-3, 9e-3))
    found, likely = (parts_of(BUSY, way, Cluster(16, 2, FAST), one) for one in (end, "median"))
    for name in ("data", "slowest", "encoding", "transfer"):
        ends = sorted((getattr(found, name), getattr(likely, name)), reverse=end == "high")
        assert ends[0] == getattr(found, name), name
        assert ends[0] != ends[1], name


def test_the_error_of_the_checks_widens_both_ends():
    for name in ("step", "speed", "efficiency"):
        exact, wide = (getattr(forecast(BUSY, WAYS[0], Cluster(16, 2, FAST), e), name) for e in (0.0, 0.25))
        assert wide.median == exact.median
        assert wide.low == pytest.approx(exact.low / 1.25), name
        assert wide.high == pytest.approx(exact.high * 1.25), name


def test_powersgd_without_factors_agrees_once():
    assert low_rank([(1024,)], 4).agreements == 1
    once, twice = (
        parts_of(MEASURED, replace(low_rank([(1024,)], 4), agreements=n), Cluster(4, 1, FAST)) for n in (1, 2)
    )
    small, hop = 1e-3 - 5 * 5e-5, 5e-5
    assert twice.agreement - once.agreement == pytest.approx(small + 1.5 * 6 * hop)


def test_gpus_send_gradients_in_the_buckets_of_the_job():
    shapes = [(512, 1024)] * 8
    assert uncompressed(shapes).sizes == (16 * MIB,)
    assert uncompressed(shapes, on_gpu=True).sizes == (4 * MIB,) * 4
    assert half(shapes, on_gpu=True).sizes == (2 * MIB,) * 4
    assert uncompressed([(8,), (300_000,), (400_000,)], on_gpu=True).sizes == (1_600_000, 1_200_032)


@pytest.mark.parametrize("controller", ["MPI", "Gloo"])
def test_bytes_of_gpus_are_moved_by_nccl(controller):
    measured = replace(
        MEASURED, on_gpu=True, controller=controller, curve=Curve([(4096, sure(1e-3)), (MIB, sure(1e-3))])
    )
    found = parts_of(measured, WAYS[0], Cluster(4, 1, FAST))
    assert found.transfer == pytest.approx(1.5 * WAYS[0].sizes[0] * 8 / 1e10 / 0.95)


def test_a_measured_network_does_not_hide_its_slow_hops_among_those_within_hosts():
    # raw: of the three hops of a tree over 2 x 4 workers, two took 2 us and one took 50 us
    measured = replace(MEASURED, workers=8, hosts=2, slots=4, controller="MPI", raw=sure(54e-6))
    agreement = replace(uncompressed(SHAPES), sizes=(), small=0)
    smallest = 1e-3 - 18e-6 * (1.5 * 3 + math.sqrt(6 * 14))  # without the hops of the measured one
    few, many = (
        parts_of(measured, agreement, Cluster(count, 4), "median").agreement - smallest for count in (8, 512)
    )
    assert few == pytest.approx(1.5 * 54e-6)
    assert many == pytest.approx(1.5 * 7 * 54e-6), "128 hosts are reached in seven hops"
    low = parts_of(measured, agreement, Cluster(512, 4), "low").agreement
    assert low == pytest.approx(1e-3 - 18e-6 * (1.0 * 3 + math.sqrt(6 * 14)) + 9 * 18e-6)


STEP = Spread(25e-3, 11e-3, 30e-3)
DISTURBED = (
    replace(MEASURED, step=STEP, compute=Spread(18e-3, 17e-3, 20e-3)),
    replace(MEASURED, step=STEP, compute=Spread(4e-3, 3e-3, 5e-3)),
    replace(MEASURED, step=Spread(25e-3, 24e-3, 90e-3), controller="MPI"),
    replace(MEASURED, step=Spread(25e-3, 1e-4, 30e-3), data=Spread(3e-3, 2e-3, 4e-3), lag=sure(1e-3)),
)


@pytest.mark.parametrize("measured", DISTURBED)
def test_the_range_at_the_measured_number_of_workers_has_what_was_measured(measured):
    found = forecast(measured, WAYS[0], Cluster(2, 2))
    assert found.step.median == pytest.approx(max(25e-3, explained(measured).step + rest_of(measured).median))
    assert found.step.low <= measured.step.low * (1 + 1e-9)
    assert found.step.high >= measured.step.high * (1 - 1e-9)
    assert found.speed.high >= 2 * 32 / measured.step.low * (1 - 1e-9)


@pytest.mark.parametrize("measured", DISTURBED)
def test_what_disturbed_the_measured_steps_widens_all_predictions(measured):
    exact = replace(measured, step=sure(measured.step.median))
    wide, narrow = (forecast(one, WAYS[0], Cluster(16, 1, FAST)) for one in (measured, exact))
    assert wide.step.low <= narrow.step.low
    assert wide.step.high > narrow.step.high
    assert wide.step.median == narrow.step.median


def test_parts_longer_than_the_steps_that_they_are_of_are_shortened_at_the_low_end():
    assert alone_share(MEASURED) == 1.0
    assert alone_share(DISTURBED[0]) == pytest.approx(11 / 18)
    low = parts_of(DISTURBED[0], WAYS[0], Cluster(2, 2), "low")
    assert (low.data + low.compute + low.slowest, low.data) == pytest.approx((11e-3, 11e-3 / 18))


def test_one_worker_exchanges_nothing():
    assert parts_of(MEASURED, WAYS[0], Cluster(1, 1)) == Parts(1e-3, 20e-3)
    assert forecast(MEASURED, WAYS[0], Cluster(1, 1)).efficiency.median == 1.0


def test_overlap_hides_as_much_as_was_measured():
    measured = replace(MEASURED, step=sure(21e-3))  # everything hidden
    assert rest_of(measured).median < 0
    assert parts_of(measured, WAYS[0], Cluster(2, 2)).step == pytest.approx(21e-3)
    assert parts_of(measured, WAYS[1], Cluster(2, 2)).step == pytest.approx(21e-3)
    slow = parts_of(measured, WAYS[0], Cluster(4, 1, parse_link("100mbit")))
    assert slow.step > 21e-3
    assert parts_of(measured, WAYS[0], Cluster(2, 2), "high").step == pytest.approx(explained(measured).step)


LINKS = st.floats(1e6, 1e12).map(lambda bits: Link("any", bits))
COUNTS = st.integers(1, 10).map(lambda power: 1 << power)
CLUSTERS = st.builds(Cluster, COUNTS, st.integers(1, 16), LINKS)
JOBS = st.builds(
    lambda step, spread, controller, has_raw: replace(
        MEASURED,
        controller=controller,
        step=Spread(step, 0.9 * step, 1.2 * step),
        compute=Spread(20e-3, 19e-3, 22e-3),
        deviations=[-spread, 0.0, spread],
        raw=sure(1e-4) if has_raw else None,
    ),
    st.floats(15e-3, 0.1),
    st.floats(0, 5e-3),
    st.sampled_from(["MPI", "Gloo"]),
    st.booleans(),
)


@settings(deadline=None)
@given(JOBS, st.sampled_from(WAYS), CLUSTERS, st.floats(0, 1))
def test_predictions_lie_in_their_ranges(measured, way, cluster, error):
    found = forecast(measured, way, cluster, error)
    for one in (found.step, found.speed, found.efficiency):
        assert 0 < one.low <= one.median <= one.high
    assert found.efficiency.high <= 1
    if way is WAYS[0] and (cluster.workers, cluster.hosts) == (2, 1):
        assert found.step.low <= measured.step.low * (1 + 1e-9)
        assert found.step.high >= measured.step.high * (1 - 1e-9)
    exact = forecast(measured, way, cluster)
    assert found.step.low <= exact.step.low <= exact.step.high <= found.step.high


@settings(deadline=None)
@given(JOBS, st.sampled_from(WAYS), CLUSTERS, st.floats(1, 100))
def test_more_bandwidth_makes_no_step_longer(measured, way, cluster, factor):
    quick = replace(cluster, link=cluster.link.times_as_fast(factor))
    slow, fast = (forecast(measured, way, one) for one in (cluster, quick))
    assert fast.step.median <= slow.step.median * (1 + 1e-9)
    assert fast.step.high <= slow.step.high * (1 + 1e-9)


@settings(deadline=None)
@given(JOBS, st.sampled_from(WAYS), COUNTS, LINKS)
def test_more_workers_make_no_step_shorter(measured, way, workers, link):
    few, many = (parts_of(measured, way, Cluster(count, 1, link)).step for count in (workers, 2 * workers))
    assert many >= few * (1 - 1e-9)


@settings(deadline=None)
@given(JOBS, COUNTS, LINKS)
def test_fewer_bytes_make_no_step_longer_if_they_cost_nothing(measured, workers, link):
    cluster = Cluster(workers, 1, link)
    fewer = replace(WAYS[0], sizes=WAYS[1].sizes)
    assert parts_of(measured, fewer, cluster).step <= parts_of(measured, WAYS[0], cluster).step + 1e-12


def test_an_endless_link_leaves_what_a_host_takes():
    near, far = (
        parts_of(MEASURED, WAYS[0], Cluster(4, slots, Link("any", 1e15, sure(0.0)))) for slots in (4, 1)
    )
    assert far.step == pytest.approx(near.step, rel=1e-6)


def test_rare_exchanges_leave_computing_alone():
    rare = local_steps(SHAPES, 10**9, 0)
    parts = parts_of(MEASURED, rare, Cluster(512, 1, FAST))
    assert parts.efficiency == pytest.approx(1.0, abs=1e-6)


def test_a_check_compares_both_ways_round():
    assert Check(2, 2, 3.0, 2.0).error == pytest.approx(0.5)
    assert Check(2, 2, 2.0, 3.0).error == pytest.approx(0.5)
    assert largest_error([]) == 0
    here = check_here(MEASURED)
    assert here.error == pytest.approx(30e-3 / explained(MEASURED).step - 1)


@pytest.mark.parametrize(("step", "error"), [(21e-3, 0.0), (24e-3, 0.0), (20e-3, 0.05), (52.008e-3, 1.0)])
def test_a_gpu_may_hide_any_part_of_the_exchange(step, error):
    found = check_here(replace(MEASURED, on_gpu=True, step=sure(step)))
    assert found.error == pytest.approx(error, abs=1e-3)


def test_another_number_of_workers_is_predicted_with_its_own_computing():
    other = replace(MEASURED, workers=4, slots=4, compute=sure(25e-3), step=sure(40e-3))
    found = check_other(MEASURED, other)
    parts = parts_of(MEASURED, WAYS[0], Cluster(4, 4))
    assert found.predicted == pytest.approx(parts.step + 5e-3)
    assert (found.workers, found.source, found.measured) == (4, 2, 40e-3)
    assert check_other(MEASURED, replace(MEASURED, workers=1)) is None


def test_numbers_of_workers_are_powers_of_two_and_all_slots():
    assert counts_for(None, 2, measured_network=False) == [2, 4, 8, 16, 32, 64]
    assert counts_for(3, 6, measured_network=False) == [2, 4, 8, 16, 18]
    assert counts_for(1, 1, measured_network=False) == []
    assert counts_for(4, 4, measured_network=True) == [8, 16]


def test_the_page_has_the_numbers_of_the_code():
    page = " ".join((ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").split())
    gloo, mpi, nccl = (_said(SATURATION[name]) for name in ("Gloo", "MPI", "NCCL"))
    assert f"Gloo {gloo}, MPI {mpi}, NCCL {nccl}" in page
    assert f"{_said(AGREEMENTS)} |" in page
    assert f"Links**: {_said(PAYLOAD)} of the bits" in page
    latency = USUAL_LATENCY.times(1e6)
    assert f"it is {latency.median:.0f} us ({latency.low:.0f} to {latency.high:.0f} us)" in page


def _said(spread: Spread) -> str:
    return f"{spread.median:g} ({spread.low:g} to {spread.high:g})"
