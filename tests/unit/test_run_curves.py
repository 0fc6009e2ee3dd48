"""The data behind a page's curves: what is drawn, what is thinned out, and what is said of gaps."""

import numpy as np
import pytest
from support.stored_runs import evaluation, make_run, window

from hvdtrain.tools.report.run_log import read_log


def test_a_curve_has_the_numbers_of_the_log_on_every_axis(tmp_path):
    log = read_log(make_run(tmp_path, window(10), evaluation(10), window(20)))
    curve = log.curves["train", "loss"]
    assert curve.values.tolist() == [1 / 10, 1 / 20]
    assert {name: values.tolist() for name, values in curve.axes.items()} == {
        "step": [10, 20], "epoch": [1, 2], "samples": [320, 640], "seconds": [2, 4],
    }  # fmt: skip
    assert log.curves["eval", "accuracy"].values.tolist() == [0.9]


def test_a_name_that_some_windows_lack_has_no_gap_there(tmp_path):
    log = read_log(make_run(tmp_path, window(10, slowest_rank=1), window(20), window(30, slowest_rank=0)))
    curve = log.curves["train", "slowest_rank"]
    assert curve.axes["step"].tolist() == [10, 30]
    assert curve.values.tolist() == [1, 0]


@pytest.mark.parametrize("value", ["null", "NaN", "Infinity", "-Infinity", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_a_gap(tmp_path, value):
    run = make_run(tmp_path, window(10), window(20), window(30))
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 0.05', f'"loss": {value}'))
    log = read_log(run)
    assert np.isnan(log.curves["train", "loss"].values).tolist() == [False, True, False]
