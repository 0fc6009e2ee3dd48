"""The space of a sweep, its plan and what of it is refused."""

import pytest
from support.documents import ROOT, blocks

from hvdtrain.config import Config, Layer
from hvdtrain.errors import ConfigError, EnvironmentFault, UsageError
from hvdtrain.search import side_by_side
from hvdtrain.search.options import SweepOptions
from hvdtrain.search.space import config_values, first_point, grid_points, label_of, parse_space
from hvdtrain.search.sweep_plan import make_plan

RATE = {"low": 1e-4, "high": 1e-1, "log": True}
LAYERS = [Layer("options", {"framework": "torch", "epochs": 2.0})]


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"learning_rat": [1]}, "no field 'learning_rat'"),
        ({"learning_rate": {"low": 1, "high": 1}}, "the range is empty"),
        ({"learning_rate": {"low": 0, "high": 1, "log": True}}, "greater than 0 with log: true, found 0"),
        ({"learning_rate": {"low": 1e-4}}, "a range has low, high"),
        ({"learning_rate": {**RATE, "step": 0.1}}, "there is none with log"),
        ({"learning_rate": 0.1}, "should be a range or a list of choices, found 0.1"),
        ({"learning_rate": []}, "a list of different values"),
        ({"learning_rate": [0.1, 0.1]}, "a list of different values"),
        ({"learning_rate": [0.1, -0.1]}, "greater than 0, found -0.1"),
        ({"momentum": {"low": 0.5, "high": 1.5}}, "less than 1, found 1.5"),
        ({"batch_size": {"low": 8.5, "high": 32}}, "whole number"),
        ({"optimizer": {"low": 1, "high": 2}}, "no number"),
        ({"optimizer": ["sgd", "adam"]}, "found 'adam'"),
        ({"run_dir": ["a", "b"]}, "the sweep sets it"),
        ({"learning_rate.x": [1, 2]}, "only task_options has fields"),
        ({"task_options": [{"a": 1}]}, "searched one by one"),
        ({}, "should be a mapping"),
        ([1], "should be a mapping"),
    ],
    ids=str,
)
def test_a_space_that_cannot_be_meant_is_refused(space, message):
    with pytest.raises(ConfigError, match=message):
        parse_space(space, "sweep.yaml: space")


def test_points_become_config_fields():
    space = parse_space(
        {
            "learning_rate": RATE,
            "task_options.hidden": [32, 64],
            "task_options.depth": {"low": 1, "high": 3},
            "clip_norm": [None, 1.0],
            "lr_step_epochs": [[1.0, 2.0], [3.0]],
        },
        "space",
    )
    point = {
        **first_point(space),
        "task_options.hidden": 64,
        "lr_step_epochs": label_of([3.0]),
        "learning_rate": 0.01,
    }
    assert config_values(space, point) == {
        "learning_rate": 0.01,
        "task_options": {"hidden": 64, "depth": 1},
        "clip_norm": None,
        "lr_step_epochs": [3.0],
    }


def test_a_range_has_whole_numbers_where_its_field_has():
    space = parse_space(
        {
            "batch_size": {"low": 8, "high": 64, "log": True},
            "weight_decay": {"low": 0, "high": 1},
            "task_options.width": {"low": 1, "high": 4},
            "task_options.scale": {"low": 1.0, "high": 4},
        },
        "space",
    )
    assert [one.is_whole for one in space] == [True, False, True, False]


def test_a_grid_has_all_points():
    space = parse_space({"momentum": {"low": 0.5, "high": 0.9, "step": 0.2}, "batch_size": [8, 16]}, "space")
    points = grid_points(space)
    assert len(points) == 6
    assert {point["batch_size"] for point in points} == {8, 16}
    assert sorted({point["momentum"] for point in points}) == pytest.approx([0.5, 0.7, 0.9])
    with pytest.raises(ConfigError, match="a grid needs values"):
        grid_points(parse_space({"learning_rate": RATE}, "space"))


def plan(options=None, layers=(), path=None, **given):
    return make_plan(path, [*LAYERS, *layers], options or SweepOptions(**given))


SPACE = ("learning_rate={low: 1e-4, high: 1e-1, log: true}",)


def test_options_take_precedence_over_the_file(tmp_path):
    file = tmp_path / "tries.yaml"
    file.write_text(
        "metric: accuracy\ntrials: 7\nsampler: random\nspace: {batch_size: [8, 16]}\n"
        "config: {task: digits, seed: 3}\n"
    )
    found = plan(path=file, trials=3, space=SPACE)
    assert (found.trials, found.sampler, str(found.goal)) == (3, "random", "accuracy:max")
    assert [one.name for one in found.space] == ["batch_size", "learning_rate"]
    assert found.config.seed == 3
    assert str(found.folder) == "sweeps/tries"
    assert str(plan(space=SPACE).folder) == "sweeps/digits-torch"


@pytest.mark.parametrize(
    ("given", "layers", "message"),
    [
        ({}, (), "there is no space"),
        ({"space": SPACE, "metric": "accurac"}, (), "metric: .*accurac"),
        ({"space": SPACE, "metric": "a:best"}, (), "metric: must be the name of a metric"),
        ({"space": SPACE}, (Layer("options", {"learning_rate": 0.1}),), "sets it too"),
        ({"space": SPACE}, (Layer("options", {"run_dir": "runs/a"}),), "run_dir runs/a: a sweep gives each"),
        ({"space": SPACE}, (Layer("options", {"resume": "auto"}),), "resume auto: a sweep gives each"),
        ({"space": SPACE, "pruner": "median"}, (Layer("--set", {"eval_every": None}),), "eval_every is null"),
        ({"space": SPACE, "num_proc": 10**4}, (), "need a slot each"),
        ({"space": SPACE, "parallel": 10**4}, (), "need a core each"),
        ({"space": SPACE, "sampler": "grid"}, (), "a grid needs values"),
        ({"space": ("batch_size=[8, 16]", "global_batch_size=[8, 16]")}, (), "sets both"),
    ],
    ids=str,
)
def test_a_sweep_that_cannot_be_meant_is_refused(given, layers, message):
    with pytest.raises(UsageError, match=message):
        plan(layers=layers, **given)


def test_how_many_run_side_by_side_is_no_part_of_a_sweeps_identity(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    alone, beside = plan(space=SPACE), plan(space=SPACE, parallel=4)
    assert (alone.threads, beside.threads) == (None, 2)
    assert beside.identity == alone.identity
    own = plan(space=SPACE, parallel=4, layers=[Layer("options", {"threads": 1})])
    assert own.threads is None
    assert own.identity != alone.identity


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ["0", "1", "2", "3"]),
        ("3, 1", ["3", "1"]),
        ("GPU-5a,GPU-7b,GPU-9c", ["GPU-5a", "GPU-7b", "GPU-9c"]),
        ("2,0,-1,1", ["2", "0"]),
        ("", []),
    ],
)
def test_trials_side_by_side_share_the_gpus_that_the_user_gives(monkeypatch, tmp_path, visible, gpus):
    for number in range(4):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(side_by_side, "_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = Config(framework="torch", epochs=1)
    assert side_by_side.check_gpus(1, 2, config) == gpus
    assert side_by_side.check_gpus(1, 1, config) == []
    if gpus:
        with pytest.raises(EnvironmentFault, match=f"need a GPU each, of {len(gpus)}"):
            side_by_side.check_gpus(1, 5, config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: 3\nspace: {seed: [1, 2]}", "'epochs' is no key .*\n?.*under config"),
        ("spce: {seed: [1, 2]}", "Did you mean 'space'"),
        ("trials: 0\nspace: {seed: [1, 2]}", "trials: should be a whole number"),
        ("sampler: best\nspace: {seed: [1, 2]}", "sampler: should be one of"),
        ("config: 3\nspace: {seed: [1, 2]}", "config: should be a mapping"),
        ("config: {epoch: 3}\nspace: {seed: [1, 2]}", "no field 'epoch'"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path, text, message):
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        plan(path=file)


def test_the_documented_file_is_a_sweep(tmp_path, monkeypatch):
    page = [block.text for block in blocks(ROOT / "docs" / "search.md") if block.language == "yaml"]
    assert len(page) == 1
    file = tmp_path / "sweep.yaml"
    file.write_text(page[0])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    found = make_plan(file, [], SweepOptions())
    assert (found.trials, found.workers, found.pruner, str(found.goal)) == (20, 2, "median", "accuracy:max")
    assert [one.name for one in found.space] == ["learning_rate", "batch_size"]
