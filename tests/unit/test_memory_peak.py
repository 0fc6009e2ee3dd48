"""The most memory that a worker has had: reported in turn, kept as the largest, and written to the log."""

import pytest
from support.fakes import FakeBackend, FakeLocalBackend, make_loop_session, on_every_rank

from hvdtrain.backends import hooks
from hvdtrain.backends.records import DeviceMemory
from hvdtrain.loop import run


@pytest.mark.parametrize(("kind", "fields"), [(FakeBackend, {}), (FakeLocalBackend, {"sync_every": 2})])
def test_every_line_has_the_largest_of_all_workers(kind, fields, tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "peak_bytes", lambda: 100 << 20)

    class Growing(kind):
        def device_memory(self):
            return DeviceMemory(50 * self.workers.rank + self._number << 20)

    def work(workers):
        session = make_loop_session(
            tmp_path, Growing(workers), eval_size=4, train_size=64, eval_every=4, batch_size=1, **fields
        )
        run(session)
        return session

    sessions = on_every_rank(["here"] * 3, work)
    lines = sessions[0].services.report.memory
    assert all(session.services.report.memory == lines for session in sessions), "the same on every worker"
    assert all(line["peak_memory_mib"] == 100.0 for line in lines)
    device = [line["peak_device_memory_mib"] for line in lines]
    steps = sessions[0].state.progress.step
    assert device == sorted(device)
    assert device[0] >= 100, "all have told theirs before the first step"
    assert 100 + steps - 3 * fields.get("sync_every", 1) <= device[-1] <= 100 + steps
    last = [session.services.hooks.values()["peak_device_memory_mib"] for session in sessions]
    assert last == [100 + steps] * 3, "and after the last one"
