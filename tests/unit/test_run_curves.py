"""The data behind a page's curves: what is drawn, what is thinned out, and what is said of gaps."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stored_runs import change, evaluation, make_run, window

from hvdtrain.run_views.chart_plan import POINTS, plan_charts
from hvdtrain.run_views.curves import read_log
from hvdtrain.run_views.thinning import LEAST, points_for_each, thin


def test_a_curve_has_the_numbers_of_the_log_on_every_axis(tmp_path):
    log = read_log(make_run(tmp_path, window(10), evaluation(10), window(20)))
    curve = log.curves["train", "loss"]
    assert curve.values.tolist() == [1 / 10, 1 / 20]
    assert {name: values.tolist() for name, values in curve.axes.items()} == {
        "step": [10, 20], "epoch": [1, 2], "samples": [320, 640], "seconds": [2, 4],
    }  # fmt: skip
    assert log.curves["eval", "accuracy"].values.tolist() == [0.9]
    assert log.last["step"] == 20


def test_a_name_that_some_windows_lack_has_no_gap_there(tmp_path):
    log = read_log(make_run(tmp_path, window(10, slowest_rank=1), window(20), window(30, slowest_rank=0)))
    curve = log.curves["train", "slowest_rank"]
    assert curve.axes["step"].tolist() == [10, 30]
    assert curve.values.tolist() == [1, 0]


@pytest.mark.parametrize("value", ["null", "NaN", "Infinity", "-Infinity", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_a_gap_and_is_said(tmp_path, value):
    run = make_run(tmp_path, window(10), window(20), window(30))
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 0.05', f'"loss": {value}'))
    log = read_log(run)
    assert np.isnan(log.curves["train", "loss"].values).tolist() == [False, True, False]
    assert any("mine: loss (training): 1 of 3 numbers" in note for note in plan_charts(["mine"], [log]).notes)


@pytest.mark.parametrize(
    "step", [10**400, -(10**400), 2**60, True, 1.5, None], ids=lambda step: f"{step!s:.9}"
)
def test_a_record_whose_step_is_none_is_left_out(tmp_path, step):
    records = {**window(20), "step": step}, {**evaluation(20), "step": step}, {**change(20), "step": step}
    log = read_log(make_run(tmp_path, window(10), *records))
    assert (log.last["step"], list(log.events)) == (10, [])
    assert {phase for phase, _ in log.curves} == {"train"}
    assert log.curves["train", "loss"].values.tolist() == [0.1]


@pytest.mark.parametrize("rest", ['{"phase": "train", "st', "\x00\xff\n", "[1]\n", "null\n", "[" * 5000])
def test_a_line_that_is_none_is_left_out(tmp_path, rest):
    run = make_run(tmp_path, window(10))
    with (run / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write(rest)
    assert read_log(run).curves["train", "loss"].values.tolist() == [0.1]


def test_what_is_no_number_is_no_curve(tmp_path):
    record = window(10, label="x", flag=True, values=[1], more={"a": 1})
    assert not {"label", "flag", "values", "more"} & {
        name for _, name in read_log(make_run(tmp_path, record, {**window(20), "step": "x"})).curves
    }


def test_a_log_with_endless_names_is_cut_and_said(tmp_path):
    log = read_log(make_run(tmp_path, *(window(step, **{f"m{step}": 1.0}) for step in range(1, 300))))
    assert len(log.curves) == 100
    assert "only the first 100" in log.problem


def test_a_run_without_a_log_has_no_curves(tmp_path):
    run = make_run(tmp_path)
    assert read_log(run).curves == {}
    (run / "metrics.jsonl").unlink()
    assert (read_log(run).curves, read_log(run).problem) == ({}, "")
    (run / "metrics.jsonl").mkdir()
    assert "cannot be read" in read_log(run).problem


def test_a_place_is_found_at_the_record_before(tmp_path):
    log = read_log(make_run(tmp_path, window(10), window(20)))
    assert log.place_of(15) == {"step": 15, "epoch": 1, "samples": 320, "seconds": 2}
    assert log.place_of(5) == {"step": 5, "epoch": 0, "samples": 0, "seconds": 0}


VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=400)


@given(VALUES, st.integers(4, 100))
def test_thinning_loses_no_extreme(values, limit):
    array = np.array(values)
    kept = thin(array, limit)
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert {0, len(values) - 1} <= set(kept.tolist())
    finite = array[np.isfinite(array)]
    assert np.isfinite(array[kept]).sum() <= limit
    if len(finite):
        assert np.nanmin(array[kept]) == finite.min()
        assert np.nanmax(array[kept]) == finite.max()
    if len(finite) < len(values):
        assert np.isnan(array[kept]).any(), "a gap stays one"


def test_a_short_curve_keeps_all_points():
    assert thin(np.arange(50.0), 50).tolist() == list(range(50))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=300), st.integers(1000, 100_000))
def test_points_are_shared_out_so_that_short_curves_leave_theirs_to_long_ones(lengths, total):
    limit = points_for_each(lengths, total)
    assert sum(min(length, limit) for length in lengths) <= max(total, LEAST * len(lengths))
    assert limit >= min(LEAST, *lengths)


def test_long_runs_are_thinned_out_and_that_is_said(tmp_path):
    logs = [read_log(make_run(tmp_path, *(window(step) for step in range(1, 9001))))]
    plan = plan_charts(["mine"], logs)
    drawn = sum(len(line.curve.values) for chart in plan.charts for line in chart.lines)
    assert POINTS / 2 < drawn <= POINTS
    assert sum("thinned out" in note for note in plan.notes) == 1
    loss = plan.charts[0].lines[0]
    assert (loss.total, loss.curve.values.max(), loss.curve.values.min()) == (9000, 1.0, 1 / 9000)


def titles(*logs):
    return [chart.title for chart in plan_charts([str(i) for i in range(len(logs))], list(logs)).charts]


def test_charts_stand_in_order(tmp_path):
    callback = {
        "phase": "callback",
        "step": 10,
        "samples": 1,
        "epoch": 1,
        "norm": 2.0,
        "workers": 2,
        "seconds": 1,
    }
    records = [
        evaluation(10, accuracy=0.5, loss=0.5, **{"noisy/loss": 0.6}), callback,
        window(10, wait_fraction=0.1, slowest_rank=1),
    ]  # fmt: skip
    assert titles(read_log(make_run(tmp_path, *records))) == [
        "Loss",
        "Accuracy in evaluation",
        "Noisy/loss in evaluation",
        "Learning rate",
        "Throughput (samples/s)",
        "Waiting for data (fraction of the time)",
        "Waiting for the slowest worker (fraction of the time)",
        "Slowest rank",
        "Norm of a callback",
    ]


def test_many_runs_have_training_and_evaluation_apart(tmp_path):
    log = read_log(make_run(tmp_path, window(10), evaluation(10)))
    assert titles(log)[0] == "Loss"
    assert titles(*[log] * 4)[:2] == ["Loss in training", "Loss in evaluation"]


def test_names_that_differ_in_their_first_letter_have_a_chart_each(tmp_path):
    run = make_run(tmp_path, evaluation(10, accuracy=0.5, Accuracy=0.7))
    charts = plan_charts(["a"], [read_log(run)]).charts
    assert [(chart.title, chart.lines[0].curve.values.tolist()) for chart in charts] == [
        ("Accuracy in evaluation (accuracy)", [0.5]), ("Accuracy in evaluation (Accuracy)", [0.7]),
    ]  # fmt: skip


def test_workers_are_drawn_if_they_change(tmp_path):
    assert "Workers" not in titles(read_log(make_run(tmp_path / "a", window(10), window(20))))
    changed = make_run(tmp_path / "b", window(10), change(10), window(20, workers=1))
    assert "Workers" in titles(read_log(changed))


def test_a_loss_that_spans_much_has_a_logarithmic_axis(tmp_path):
    charts = plan_charts(["a"], [read_log(make_run(tmp_path, window(1, loss=5.0), window(2, loss=0.001)))])
    assert [chart.title for chart in charts.charts if chart.is_logarithmic] == ["Loss in training"]


def test_a_number_that_would_hide_the_others_is_not_drawn_and_said(tmp_path):
    plan = plan_charts(["a"], [read_log(make_run(tmp_path, window(1), window(2, loss=1e35)))])
    assert np.isnan(plan.charts[0].lines[0].curve.values).tolist() == [False, True]
    assert "a: loss (training): numbers beyond 1e30 are not drawn (step 2)." in plan.notes
