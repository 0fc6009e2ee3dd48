"""A sweep: trials begin, end in every way, are pruned, and continue after the sweep was killed."""

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from hvdtrain.bench.worker import layers_from_json
from hvdtrain.callbacks import RunContext
from hvdtrain.config import Config, Layer
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import EnvironmentFault, Interrupted, UsageError
from hvdtrain.metrics import StepInfo
from hvdtrain.schedule import Cadence
from hvdtrain.search import sweep as module
from hvdtrain.search.pruning import StudyCallback, evaluations_at
from hvdtrain.search.space import parse_space
from hvdtrain.search.study import SweepStudy
from hvdtrain.search.sweep import run_sweep
from hvdtrain.search.sweep_plan import SweepPlan
from hvdtrain.search.sweep_table import SweepTable
from hvdtrain.search.trial_run import wait_until_free

SPACE = {"learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "task_options.hidden": [32, 64]}


def plan_in(folder: Path, **changes) -> SweepPlan:
    plan = SweepPlan(
        folder=folder / "sweep",
        layers=[Layer("options", {"framework": "torch"})],
        config=Config(framework="torch", epochs=4, seed=1),
        space=parse_space(SPACE, "space"),
        goal=MetricGoal.parse("accuracy"),
        trials=4,
        sampler="random",
        pruner="none",
        storage="journal",
        workers=1,
        parallel=1,
        hosts="localhost:1",
    )
    return replace(plan, **changes)


class Jobs:
    """Stands for the jobs: ``endings`` are their exit codes in order, then all complete."""

    def __init__(self, monkeypatch, endings=(), value=lambda told: told["values"]["learning_rate"]) -> None:
        self.endings, self.value = list(endings), value
        self.told: list[dict] = []
        self.running = self.most = 0
        monkeypatch.setattr(module, "Child", self.start)
        monkeypatch.setattr(module, "end_children", lambda children: None)
        monkeypatch.setattr(module, "_POLL_SECONDS", 0)

    def start(self, command, log: Path, environ) -> "Jobs._Job":
        told = json.loads(Path(command[-1]).read_text())
        layers = layers_from_json(told["layers"])
        told["values"], told["place"] = layers[-2].values, layers[-1].values
        told["environ"], told["first"] = environ, layers[0]
        self.told.append(told)
        self.running += 1
        self.most = max(self.most, self.running)
        return self._Job(self, told, log, self.endings.pop(0) if self.endings else 0)

    class _Job:
        def __init__(self, jobs, told, log, ending) -> None:
            self.jobs, self.told, self.log, self.ending, self.polls = jobs, told, log, ending, 0

        def code(self) -> int | None:
            if isinstance(self.ending, BaseException):
                raise self.ending
            self.polls += 1
            if self.polls < 3:
                return None
            if self.ending == 0 or isinstance(self.ending, str):
                run = Path(self.told["place"]["run_dir"])
                run.mkdir(exist_ok=True)
                summary = {
                    "status": "completed", "final": {"accuracy": self.jobs.value(self.told)},
                    "seconds": 1.0, "steps": 5,
                }  # fmt: skip
                if isinstance(self.ending, str):
                    summary["stopped_early"] = self.ending
                (run / "summary.json").write_text(json.dumps(summary))
                return 0
            return self.ending

        def last_lines(self) -> str:
            return "[1,0]<stderr>:hvdtrain: the loss is nan at step 3\n  Lower it."

        def close(self) -> None:
            self.jobs.running -= 1


def silent(_: str) -> None:
    """Say nothing."""


def states(study) -> list[str]:
    return [trial.state.name for trial in study.trials]


@pytest.mark.parametrize("storage", ["journal", "sqlite"])
def test_trials_run_to_their_number_and_are_kept(monkeypatch, tmp_path, storage):
    jobs = Jobs(monkeypatch)
    plan = plan_in(tmp_path, storage=storage)
    study = run_sweep(plan, silent)
    assert states(study) == 4 * ["COMPLETE"]
    assert jobs.most == 1
    again = run_sweep(plan, silent)
    assert len(jobs.told) == 4
    table = SweepTable.of(plan, again)
    assert table.best.value == max(told["values"]["learning_rate"] for told in jobs.told)
    assert table.command.endswith(f"sweep/trial-{table.best.number:04d}/config.yaml")
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert {row["task_options.hidden"] for row in rows} <= {"32", "64"}
    assert [row["number"] for row in table.to_document()["trials"]] == [row.number for row in table.rows]
    assert jobs.told[2]["place"] == {"run_dir": str(tmp_path / "sweep" / "trial-0002"), "resume": "auto"}


def test_trials_run_side_by_side(monkeypatch, tmp_path):
    jobs = Jobs(monkeypatch)
    plan = plan_in(tmp_path, parallel=3, trials=7, threads=2, gpus=["5", "GPU-a", "7", "8"])
    assert states(run_sweep(plan, silent)) == 7 * ["COMPLETE"]
    assert jobs.most == 3
    assert [told["environ"]["CUDA_VISIBLE_DEVICES"] for told in jobs.told[:3]] == ["5", "GPU-a", "7"]
    assert all(told["first"].values == {"threads": 2} for told in jobs.told)


def test_a_sweep_continues_with_more_trials_side_by_side(monkeypatch, tmp_path):
    jobs = Jobs(monkeypatch)
    run_sweep(plan_in(tmp_path, trials=2), silent)
    assert states(run_sweep(plan_in(tmp_path, parallel=2, threads=1), silent)) == 4 * ["COMPLETE"]
    assert jobs.most == 2


def test_a_sweep_that_was_cut_continues_with_the_points_that_it_would_have_had(monkeypatch, tmp_path):
    whole = Jobs(monkeypatch)
    run_sweep(plan_in(tmp_path / "whole"), silent)
    cut = Jobs(monkeypatch, endings=[0, Interrupted(2)])
    plan, said = plan_in(tmp_path / "cut"), []
    with pytest.raises(Interrupted):
        run_sweep(plan, said.append)
    assert said[-1] == "ending 1 trial: first they save their state"
    assert states(SweepStudy(plan)) == ["COMPLETE", "RUNNING"]
    study = run_sweep(plan, said.append)
    assert states(study) == 4 * ["COMPLETE"]
    assert "trial 1 continues: it had not ended" in said
    points = [told["values"] for told in cut.told]
    assert points[1] == points[2]  # the trial that was cut
    assert [points[0], *points[2:]] == [told["values"] for told in whole.told]
    assert study.trial(1).user_attrs["attempts"] == 2


def test_a_trial_that_ended_before_the_sweep_knew_is_not_run_again(monkeypatch, tmp_path):
    jobs = Jobs(monkeypatch, endings=[Interrupted(2)])
    plan = plan_in(tmp_path, trials=1)
    with pytest.raises(Interrupted):
        run_sweep(plan, silent)
    jobs._Job(jobs, jobs.told[0], tmp_path / "log", 0).polls = 9
    job = jobs._Job(jobs, jobs.told[0], tmp_path / "log", 0)
    job.polls = 9
    assert job.code() == 0
    assert states(run_sweep(plan, silent)) == ["COMPLETE"]
    assert len(jobs.told) == 1


def test_failures_are_kept_and_end_nothing(monkeypatch, tmp_path):
    Jobs(monkeypatch, endings=[4, 2, 2, 4])
    study = run_sweep(plan_in(tmp_path, trials=6), silent)
    assert states(study) == [*4 * ["FAIL"], "COMPLETE", "COMPLETE"]
    assert study.trial(0).user_attrs["reason"] == "the loss is nan at step 3"
    assert SweepTable.of(plan_in(tmp_path), study).describe().count("the loss is nan") == 4


def test_three_errors_in_a_row_before_training_end_it(monkeypatch, tmp_path):
    Jobs(monkeypatch, endings=[0, 2, 3, 2])
    plan = plan_in(tmp_path, trials=9)
    with pytest.raises(
        UsageError, match="3 trials in a row ended before they trained; the last one: the loss"
    ):
        run_sweep(plan, silent)
    assert states(SweepStudy(plan)) == ["COMPLETE", "FAIL", "FAIL", "FAIL"]


def test_a_trial_that_is_killed_continues_but_not_for_ever(monkeypatch, tmp_path):
    jobs = Jobs(monkeypatch, endings=[-9, 75, 0, -9, -9, -9])
    study = run_sweep(plan_in(tmp_path, trials=3), silent)
    assert [told["number"] for told in jobs.told] == [0, 0, 0, 1, 1, 1, 2]
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE"]


@pytest.mark.parametrize("kept", ["metrics.jsonl", "checkpoints/step-00000005"])
def test_a_job_that_loses_a_worker_or_its_disk_while_it_trains_continues(monkeypatch, tmp_path, kept):
    jobs = Jobs(monkeypatch, endings=[3, 3, 0, 3, 3, 3, 2])
    plan = plan_in(tmp_path, trials=4)
    for number in range(3):
        run = plan.folder / f"trial-{number:04d}"
        (run / "checkpoints").mkdir(parents=True)
        (run / kept).write_text("{}")
    study = run_sweep(plan, silent)
    assert [told["number"] for told in jobs.told] == [0, 0, 0, 1, 1, 1, 2, 3]
    assert states(study) == [
        "COMPLETE",
        "FAIL",
        "FAIL",
        "COMPLETE",
    ]  # what the task did wrong is not repeated


def test_a_trial_may_be_interrupted_with_its_sweep_as_often_as_one_likes(monkeypatch, tmp_path):
    Jobs(monkeypatch, endings=[*(Interrupted(2) for _ in range(4)), -9])
    plan = plan_in(tmp_path, trials=1)
    for _ in range(4):
        with pytest.raises(Interrupted):
            run_sweep(plan, silent)
    assert states(run_sweep(plan, silent)) == ["COMPLETE"]


@pytest.mark.parametrize("value", [float("nan"), None])
def test_a_metric_that_is_no_number_is_a_failure(monkeypatch, tmp_path, value):
    Jobs(monkeypatch, value=lambda _: value)
    study = run_sweep(plan_in(tmp_path, trials=1), silent)
    assert states(study) == ["FAIL"]
    assert study.trial(0).user_attrs["reason"].startswith("accuracy is")


def test_what_was_pruned_is_not_the_best(monkeypatch, tmp_path):
    early = "stopped early at step 9: pruned: accuracy 0.1 after evaluation 1 (median)"
    Jobs(monkeypatch, endings=[early, "stopped early at step 9: loss has not improved"])
    plan = plan_in(tmp_path, trials=2)
    study = run_sweep(plan, silent)
    assert states(study) == ["PRUNED", "COMPLETE"]
    assert SweepTable.of(plan, study).best.number == 1


def test_a_grid_is_searched_once(monkeypatch, tmp_path):
    jobs = Jobs(monkeypatch)
    space = parse_space({"seed": [1, 2, 3], "task_options.hidden": [32, 64]}, "space")
    plan = plan_in(tmp_path, space=space, sampler="grid", trials=100)
    jobs.value = lambda told: float(told["values"]["seed"])
    study = run_sweep(plan, silent)
    assert len(study.trials) == 6
    points = {(told["values"]["seed"], told["values"]["task_options"]["hidden"]) for told in jobs.told}
    assert len(points) == 6
    assert len(run_sweep(plan, silent).trials) == 6


def test_a_sweep_goes_on_with_the_points_of_a_grid_that_it_has_not_had(monkeypatch, tmp_path):
    jobs = Jobs(monkeypatch, value=lambda told: float(told["values"]["momentum"]))
    space = parse_space({"momentum": {"low": 0.1, "high": 0.9, "step": 0.1}, "seed": [1, 2]}, "space")
    run_sweep(plan_in(tmp_path, space=space, trials=3), silent)
    again = plan_in(tmp_path, space=space, sampler="grid", trials=5)
    assert len(SweepStudy(again).study.get_trials(deepcopy=False)) == 3, "no point is made before its turn"
    run_sweep(again, silent)
    run_sweep(replace(again, trials=100), silent)
    points = [(f"{told['values']['momentum']:.6g}", told["values"]["seed"]) for told in jobs.told]
    assert len(set(points[:3])) == 3
    assert len(points) == len(set(points)) == 18


def test_a_point_of_a_grid_is_searched_though_the_sweep_was_killed_while_it_was_chosen(monkeypatch, tmp_path):
    jobs = Jobs(monkeypatch, value=lambda told: float(told["values"]["seed"]))
    plan = plan_in(tmp_path, space=parse_space({"seed": [1, 2]}, "space"), sampler="grid", trials=9)
    (tmp_path / "sweep").mkdir()
    SweepStudy(plan).study.enqueue_trial({"seed": 1})
    SweepStudy(plan).study.ask()
    study = run_sweep(plan, silent)
    assert states(study) == ["FAIL", "COMPLETE", "COMPLETE"]
    assert [told["values"]["seed"] for told in jobs.told] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"workers": 2}, r"workers \(1 before, 2 now\)"),
        ({"layers": [Layer("options", {"framework": "torch", "epochs": 3})]}, "config epochs"),
        ({"space": parse_space({"seed": [1, 2]}, "space")}, "the space"),
        ({"goal": MetricGoal.parse("loss")}, "metric"),
        ({"storage": "sqlite"}, "--storage journal"),
    ],
    ids=str,
)
def test_another_sweep_is_not_continued(monkeypatch, tmp_path, changes, what):
    Jobs(monkeypatch)
    run_sweep(plan_in(tmp_path, trials=1), silent)
    with pytest.raises(UsageError, match=what):
        run_sweep(plan_in(tmp_path, **changes), silent)


def test_two_sweeps_do_not_work_in_one_folder(monkeypatch, tmp_path):
    (tmp_path / "sweep").mkdir()
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "sweep" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(EnvironmentFault, match="in use by another sweep"):
            run_sweep(plan_in(tmp_path), silent)
        other.stdin.close()


def test_a_trial_waits_for_a_job_that_still_saves(tmp_path):
    (tmp_path / ".lock").write_text("{}")
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); time.sleep(0.5)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        wait_until_free(tmp_path)
        other.wait(60)
    wait_until_free(tmp_path / "no run yet")


def step_at(step: int, samples: int) -> StepInfo:
    return StepInfo(step, samples - 10, samples, samples / 100, 1, 0.1, 0.0)


def test_evaluations_are_counted_by_where_training_stands():
    assert evaluations_at(Cadence(5), step_at(15, 150), 100) == 3
    assert evaluations_at(Cadence(0.5, "epochs"), step_at(15, 150), 100) == 3
    assert evaluations_at(Cadence(1.0, "epochs"), step_at(11, 110), 100) == 1


def test_the_study_is_told_and_prunes(monkeypatch, tmp_path):
    """Eight trials get worse from one to the next: the median pruner ends those after its first five."""
    plan = plan_in(tmp_path, pruner="median", trials=8)
    config = plan.config.model_copy(update={"eval_every": Cadence(1.0, "epochs")})
    ended: list[int] = []

    def trained(told) -> float:
        callback = StudyCallback(
            Path(told["folder"]), told["storage"], told["pruner"], told["number"], plan.goal
        )
        callback.on_start(RunContext(0, 1, config, train_data=range(100)))
        for epoch in (1, 2, 3):
            metrics = {"accuracy": 1.0 - 0.1 * told["number"]}
            if callback.should_stop(step_at(10 * epoch, 100 * epoch), metrics):
                ended.append(told["number"])
                break
        return 1.0 - 0.1 * told["number"]

    Jobs(monkeypatch, value=trained)
    study = run_sweep(plan, silent)
    assert ended == [5, 6, 7]
    assert list(study.trial(0).intermediate_values) == [1, 2, 3]


@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_a_study_that_is_cut_ends_the_sweep_when_its_trials_have_ended(monkeypatch, tmp_path, storage):
    jobs, said = Jobs(monkeypatch), []
    plan = plan_in(tmp_path, trials=4, parallel=2, storage=storage)
    begin = jobs.start

    def cut(*args):
        if len(jobs.told) == 1:
            (file,) = plan.folder.glob("study.*")
            file.write_bytes(b"cut" * 30)
        return begin(*args)

    monkeypatch.setattr(module, "Child", cut)
    with pytest.raises(
        EnvironmentFault, match=rf"the study {plan.folder}/study\.\S+ cannot be read"
    ) as caught:
        run_sweep(plan, said.append)
    assert "another --folder begins a new one" in caught.value.remedy
    assert jobs.running == 0
