"""Several evaluation sets by name: which names, which numbers, and which set a message means."""

import json

import numpy as np
import pytest
from support.fakes import FakeBackend, dataset, make_loop_session, one_worker
from support.numpy_backend import NumpyDigits
from support.watching import records

from hvdtrain import EvalSets
from hvdtrain.data.eval_sets import check_not_bare_sets
from hvdtrain.early_stopping import RESERVED
from hvdtrain.errors import CheckpointError, ConfigError, DataError, TaskError
from hvdtrain.loop import run
from hvdtrain.reporting import compare

ARRAYS = {"inputs": np.zeros((3, 2)), "targets": np.zeros(3)}


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ä", "a\n", 3, None, *sorted(RESERVED)])
def test_a_name_that_is_not_allowed_is_refused(name):
    with pytest.raises(DataError, match="EvalSets: "):
        EvalSets({"good": ARRAYS, name: ARRAYS})


def test_data_sets_without_eval_sets_are_refused_with_how_to_write_them():
    with pytest.raises(DataError, match=r"of 2 data sets;(.|\n)*Return hvdtrain\.EvalSets\("):
        check_not_bare_sets({"validation": ARRAYS, "noisy": ARRAYS}, collates=False)


def test_the_metric_of_a_set_decides_which_checkpoint_is_best_and_when_to_stop(tmp_path):
    losses = [5.0, 3.0, 1.0, 4.0, 0.5, 3.5]  # of validation and noisy in turn: noisy gets worse
    backend = FakeBackend(one_worker(), eval_losses=losses)
    session = make_loop_session(
        tmp_path, backend=backend, eval_every=1, keep_best="noisy/loss", early_stopping="noisy/loss",
        early_stopping_patience=2, save_every=100,
    )  # fmt: skip
    session.data.evaluation = EvalSets(validation=dataset(7), noisy=dataset(5))
    run(session)
    assert session.state.best_value == 3.0
    assert session.stopped_early.startswith("stopped early at step 3: noisy/loss has not improved")


class Sets(NumpyDigits):
    """Digits with a second set; its parts can be changed by the class of a test."""

    columns, extra, first = 8, 0.0, "validation"

    def eval_data(self):
        own = super().eval_data()
        found = own.batch(np.arange(40))
        noisy = found["inputs"][:, :, : self.columns] + np.float32(self.extra)
        return EvalSets({self.first: own, "noisy": (noisy, found["targets"])})


def variant(**members: object) -> type:
    """Return ``Sets`` with other members, under the same name."""
    return type("Sets", (Sets,), members)


def test_a_whole_job_logs_both_sets_as_they_would_be_alone(train, tmp_path, capsys):
    summary = train(Sets, steps=20, eval_every=10, keep_best="noisy/accuracy")
    said = capsys.readouterr().out
    second = variant(eval_data=lambda self: Sets.eval_data(self)["noisy"])
    alone = train(second, steps=20, eval_every=10, run_dir="alone")
    plain = train(steps=20, eval_every=10, run_dir="plain")
    assert summary.final == {**plain.final, **{f"noisy/{key}": value for key, value in alone.final.items()}}
    last = [line for line in records(tmp_path / "run") if line["phase"] == "eval"][-1]
    assert {name: last[name] for name in summary.final} == summary.final
    assert "evaluation     validation (359 samples), noisy (40 samples)" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval_sets"] == ["validation", "noisy"]
    assert "eval_sets" not in json.loads((tmp_path / "plain" / "summary.json").read_text())
    compare.print_table([tmp_path / "run", tmp_path / "plain"])
    assert "eval sets validation, noisy" in capsys.readouterr().out


def test_resuming_says_which_set_changed(train):
    train(Sets, steps=4, lr_schedule="constant")
    with pytest.raises(CheckpointError, match=r"^the evaluation set 'noisy' changed since .*sample 0 has"):
        train(variant(extra=1.0), steps=8, lr_schedule="constant", resume="auto")
    # the first set has plain names in metrics, whatever it is called
    assert train(variant(first="main"), steps=8, lr_schedule="constant", resume="auto").steps == 8


@pytest.mark.parametrize(
    ("members", "error", "said"),
    [
        ({"columns": 6}, TaskError, "the first batch of the evaluation set 'noisy' fails"),
        ({"eval_data": lambda self: EvalSets(a=ARRAYS, b=[])}, DataError, "the evaluation set 'b' is empty"),
    ],
    ids=["dry run", "empty"],
)
def test_a_set_that_cannot_be_used_is_named_before_training(train, tmp_path, members, error, said):
    with pytest.raises(error) as caught:
        train(variant(**members), steps=2)
    assert said in caught.value.problem
    assert not (tmp_path / "run").exists()


def test_a_metric_of_no_set_is_refused_with_those_that_there_are(train):
    metric = "validation/accuracy"
    with pytest.raises(ConfigError, match=f"keep_best: there is no metric '{metric}'") as caught:
        train(Sets, steps=2, keep_best=metric)
    assert "those of the others begin with noisy/" in caught.value.remedy
