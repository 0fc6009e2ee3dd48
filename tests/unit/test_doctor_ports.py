"""The doctor's listeners: who is answered, and how fast."""

import pytest

from hvdtrain.tools.doctor import speed
from hvdtrain.tools.doctor.machine import Listeners, connect, open_session


@pytest.fixture
def listeners():
    listeners = Listeners({"lo": ["127.0.0.1/8"]})
    yield listeners
    listeners.close()


def test_a_listener_answers_who_knows_the_token(listeners):
    address, port, token = listeners.endpoints["lo"]
    good = connect([address, port, token])
    assert good["error"] == ""
    assert abs(good["clock"]) < 20
    assert connect([address, port, "0" * len(token)])["error"] == "the connection was closed"
    listeners.close()
    assert connect([address, port, token])["error"] == "connection refused"


def test_a_listener_is_bound_to_its_address_alone(listeners):
    _, port, token = listeners.endpoints["lo"]
    assert connect(["127.0.0.2", port, token])["error"] == "connection refused"


def test_messages_of_all_sizes_are_timed(listeners):
    with open_session(listeners.endpoints["lo"]) as session:
        times = speed.message_times(session.send)
    assert list(times) == [str(size) for size in speed.SIZES]
    assert speed.bytes_per_second(times, speed.MIB) > 1e4
