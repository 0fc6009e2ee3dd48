"""What workers ask of each other: it adds up over them and is the same on all."""

import itertools

import pytest

from hvdtrain.backends.base import NO_REQUESTS, Requests, Totals

ALL = [Requests(stop, save) for stop, save in itertools.product([False, True], repeat=2)]


@pytest.mark.parametrize("one", ALL, ids=str)
@pytest.mark.parametrize("other", ALL, ids=str)
def test_a_joined_request_asks_for_what_either_does(one, other):
    joined = one.joined(other)
    assert (joined.stop, joined.save) == (one.stop or other.stop, one.save or other.save)


@pytest.mark.parametrize("several", list(itertools.product(ALL, repeat=3)), ids=str)
def test_numbers_add_up_to_what_any_worker_asks_for(several):
    vector = [3.0, 0.0, *map(sum, zip(*(r.as_numbers() for r in several), strict=True))]
    expected = Requests(any(r.stop for r in several), any(r.save for r in several))
    assert Totals.from_vector(["loss"], vector, 1.0).requests == expected


def test_where_nobody_asks_there_is_one_object_to_tell_by():
    assert Totals.from_vector(["loss"], [3.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1.0).requests is NO_REQUESTS


def test_a_vector_has_a_sum_for_each_name_before_the_counts():
    totals = Totals.from_vector(["loss", "accuracy"], [3.0, 2.0, 5.0, 0.0, 1.0, 2.0, 0.5], 4.0)
    assert totals == Totals({"loss": 3.0, "accuracy": 2.0}, 4.0, 5, Requests(save=True), 2, 0.5)


def test_what_is_told_adds_up_over_workers():
    told = [Requests(bad_samples=1), Requests(bad_samples=2, waited_seconds=0.25), NO_REQUESTS]
    vector = [3.0, 0.0, *map(sum, zip(*(r.as_numbers() for r in told), strict=True))]
    totals = Totals.from_vector(["loss"], vector, 8.0)
    assert (totals.bad_samples, totals.waited_seconds) == (3, 0.25)
    assert totals.without_bad_samples().weight == 5.0


def test_numbers_go_to_the_end_of_a_vector():
    assert Requests(save=True, bad_samples=2).at_the_end_of(6) == (0, 0, 0, 1, 2, 0)


@pytest.mark.parametrize("missing", [0.9999999, 1.0, 1.0000001])
def test_a_count_is_whole_whatever_rounding_did(missing):
    assert Totals.from_vector([], [missing, 0.0, 0.0, 0.0, 0.0], 1.0).missing_gradients == 1


def test_a_vector_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        Totals.from_vector(["loss", "accuracy"], [3.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1.0)
