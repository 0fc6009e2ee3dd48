"""What a checkpoint keeps of a model's outputs, and what is said when others are computed."""

from types import SimpleNamespace

import numpy as np
from support.fakes import FakeBackend

from hvdtrain.backends.records import BackendInfo, DryRun
from hvdtrain.checkpoints.digest import describe_changes, digest_of, forms_of
from hvdtrain.workers.seeding import seed_host_step

ARRAYS = {
    "inputs": np.random.RandomState(0).randn(8, 5).astype(np.float32),
    "targets": np.asarray([0, 1, 2, 1, 0, -100, 2, 2]),
}
CONFIG = SimpleNamespace(stages=1, precision="fp32", framework="torch")


class Backend(FakeBackend):
    """Computes x + a constant, and a loss."""

    def __init__(self, added=0.0, loss=1.0, info="PyTorch 2.13 on the CPU", fails=None):
        self.added, self.loss, self.info, self.fails = added, loss, BackendInfo(info, {}), fails
        self.batches = []

    def dry_run(self, batch, training):
        assert not training
        self.batches.append(batch)
        values = {} if self.fails else {"loss": np.full(4, self.loss)}
        return DryRun({"logits": batch.arrays["inputs"][0] + self.added}, values, error=self.fails)


def digest(**fields):
    return digest_of(Backend(**fields), CONFIG, forms_of(ARRAYS), averaged=False)


def changes(before, averaged=False, config=CONFIG, **fields):
    return describe_changes(before, "runs/a", Backend(**fields), config, averaged)


def test_later_draws_do_not_depend_on_a_digest():
    class Drawing(Backend):
        def dry_run(self, batch, training):
            seed_host_step(1)
            return super().dry_run(batch, training)

    np.random.seed(0)
    expected = np.random.RandomState(0).rand()
    digest_of(Drawing(), CONFIG, forms_of(ARRAYS), averaged=False)
    assert np.random.rand() == expected


def test_rounding_is_no_change_and_more_is_allowed_on_other_machines():
    assert changes(digest(), added=1e-6) == []
    assert changes(digest(), added=0.005) != []
    assert changes(digest(), added=0.005, info="PyTorch 2.14 on an H100") == []
