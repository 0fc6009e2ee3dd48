"""Which part of some weights a model takes, what is said of it, and --init that loads it."""

import numpy as np
import pytest
from support.fakes import FakeBackend, given_run, on_every_rank
from support.states import make_record, make_state

from hvdtrain.backends.portable.partial import Choice, select
from hvdtrain.checkpoints import storage
from hvdtrain.config import Config
from hvdtrain.errors import CheckpointError
from hvdtrain.jobs.resume import restore

MODEL = {"model/conv/kernel": (3, 3, 1, 8), "model/conv/bias": (8,)}
MODEL |= {"model/head/kernel": (8, 10), "model/head/bias": (10,)}
WEIGHTS = {**MODEL, "model/head/kernel": (8, 5), "model/head/bias": (5,), "model/old": (2,)}
FLAGS = "Leave out what does not fit with --init-skip"


def chosen(only=(), skip=(), expected=MODEL, found=WEIGHTS):
    return select("checkpoint w", expected, found, Choice(only, skip))


@pytest.mark.parametrize(
    ("only", "skip"),
    [
        (("model/conv/*",), ()),
        (("model/conv/*", "model/head/*"), ("*/head/*",)),
        ((), ("model/head/*", "model/old")),
    ],
)
def test_what_matches_is_taken(only, skip):
    assert chosen(only, skip)[0] == ["model/conv/kernel", "model/conv/bias"]


@pytest.mark.parametrize(
    ("only", "skip", "problem", "remedy"),
    [
        (("*",), (), "misshapen: model/head/kernel must be (8, 10), is (8, 5)", FLAGS),
        ((), ("model/conv/*",), "unexpected: model/old (2,)", FLAGS),
        (("model/cov/*",), (), "--init-only: the pattern 'model/cov/*' matches nothing in the model", "conv"),
        ((), ("model/head/*", "head/*"), "--init-skip: the pattern 'head/*' matches nothing", "model/head"),
        (("model/old",), ("*",), "nothing of it is taken, because of --init-only and --init", "conv"),
    ],
)  # fmt: skip
def test_what_is_chosen_must_fit_and_each_pattern_must_match(only, skip, problem, remedy):
    with pytest.raises(CheckpointError) as caught:
        chosen(only, skip)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
    with pytest.raises(CheckpointError, match=r"missing: model/head/bias \(10,\)"):
        chosen(("model/head/*",), (), MODEL, {"model/head/kernel": (8, 10)})


def test_init_takes_a_part_and_leaves_the_rest_and_the_optimizer(tmp_path):
    """Of a checkpoint with another head and an average of its weights."""
    state = {**make_state(5.0), "model/a/bias": np.ones(9, np.float32)}
    averages = {name.replace("model", "ema"): array + 1 for name, array in state.items() if "model" in name}
    (tmp_path / "other").mkdir()
    storage.write(tmp_path / "other" / "checkpoints", state | averages, make_record(10))

    def start(workers):
        backend = FakeBackend(workers, make_state(1.0))
        config = Config(framework="torch", epochs=1, init=str(tmp_path / "other"), init_skip=["*/bias"])
        return restore(given_run(config, backend)), backend.state

    for point, found in on_every_rank(["here"] * 2, start):
        assert point.origin.startswith("EMA weights of ")
        assert point.weights.startswith("1 of 2 arrays taken, 12 of 16 numbers\n")
        assert (found["model/a/kernel"] == 6.0).all()
        assert (found["model/a/bias"] == make_state()["model/a/bias"]).all()
        assert (found["optimizer/momentum/a/kernel"] == -1.0).all()
