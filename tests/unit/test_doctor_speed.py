"""The doctor's benchmarks."""

from hvdtrain.tools.doctor import speed


def test_sizes_that_would_take_too_long_are_left_out(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])

    def send(message):
        clock[0] += len(message) / 1e6

    assert list(speed.message_times(send)) == [str(size) for size in speed.SIZES[:3]]


def test_bus_bandwidth_is_that_of_the_formula():
    assert speed.bus_bytes_per_second(1000, 4, 0.5) == 2 * 3 / 4 * 1000 / 0.5
