"""The limits of an elastic job: defaults, the environment, and what contradicts itself."""

import pytest

from hvdtrain.elastic.driver.records import make_limits
from hvdtrain.errors import UsageError


def limits(slots=4, environ=None, is_fixed=True, **given):
    return make_limits(**{"wanted": 2, **given}, slots=slots, environ=environ or {}, is_fixed=is_fixed)


def test_by_default_a_job_with_fixed_hosts_has_the_workers_that_were_asked_for():
    found = limits()
    assert (found.wanted, found.least, found.most) == (2, 2, 2)
    assert (found.start_timeout, found.elastic_timeout, found.silence_seconds) == (60, 600, 20)
    assert (found.reset_limit, found.cooldown_seconds) == (None, (5, 300))


@pytest.mark.parametrize(("slots", "most"), [(0, 2), (1, 2), (9, 9), (900, 256)])
def test_by_default_a_job_with_a_script_grows_to_its_slots(slots, most):
    assert limits(slots, is_fixed=False).most == most


def test_the_users_numbers_count():
    found = limits(least=1, most=3, start_timeout=5, elastic_timeout=7, reset_limit=0, cooldown=(1, 2))
    assert (found.least, found.most, found.start_timeout, found.elastic_timeout) == (1, 3, 5, 7)
    assert (found.reset_limit, found.cooldown_seconds) == (0, (1, 2))


def test_the_environment_counts():
    environ = {
        "HOROVOD_START_TIMEOUT": "9",
        "HOROVOD_ELASTIC_TIMEOUT": "8",
        "HVDTRAIN_HOST_SILENCE_SECONDS": "7",
    }
    found = limits(environ=environ)
    assert (found.start_timeout, found.elastic_timeout, found.silence_seconds) == (9, 8, 7)
    assert limits(environ={"HVDTRAIN_HOST_SILENCE_SECONDS": "0"}).silence_seconds > 1e5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"least": 3}, "--min-np 3 is greater"),
        ({"most": 1}, "--max-np 1 is smaller"),
        ({"wanted": 0, "least": 0}, "-np 0"),
        ({"most": 300}, "--max-np 300: an elastic job has at most 256"),
        ({"wanted": 5}, "-np 5: the hosts have 4 slots"),
        ({"cooldown": (0, 5)}, "--blacklist-cooldown-range 0 5"),
        ({"start_timeout": 0}, "--start-timeout 0"),
        ({"environ": {"HOROVOD_ELASTIC_TIMEOUT": "soon"}}, "HOROVOD_ELASTIC_TIMEOUT=soon"),
    ],
)
def test_what_contradicts_itself_is_refused(given, words):
    with pytest.raises(UsageError) as refused:
        limits(**given)
    assert words in refused.value.problem
