"""What a worker does before it meets the others: config, task and data, with every check."""

from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.config import Layer
from hvdtrain.errors import DataError, EnvironmentFault, HorovodBuildError, TaskError
from hvdtrain.horovod_build.installed import InstalledBuild
from hvdtrain.horovod_build.patching import horovod_patches, patches_digest
from hvdtrain.jobs.opening import start as starting
from hvdtrain.jobs.opening.setup import TaskData, open_task_data
from hvdtrain.jobs.opening.start import JobSpec, prepare


class Small:
    """A task that needs no framework until its model is built."""

    loss = "mse"
    defaults = {"epochs": 3, "batch_size": 7, "seed": 5, "task_options": {"size": 11}}  # noqa: RUF012

    def __init__(self, size: int = 4) -> None:
        self.size = size

    def train_data(self) -> object:
        return {"inputs": np.zeros((self.size, 2)), "targets": np.zeros(self.size)}

    def eval_data(self) -> object:
        return None

    def torch_model(self) -> object:
        raise AssertionError("models are built later")


def build_with(patches: str) -> InstalledBuild:
    return InstalledBuild("0.28.1", "2.13.0", None, None, gloo=True, nccl=False, patches=patches)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Horovod counts as installed, and nothing is set for it."""
    monkeypatch.setattr(starting, "require_horovod", lambda framework: build_with(""))
    monkeypatch.setattr(starting.environment, "prepare", lambda **_: {"SET": "1"})


def prepared(task_class: type = Small) -> JobSpec:
    return prepare([Layer("options", {"framework": "torch", "task": "small"})], task_class)


def opened(**members: object) -> TaskData:
    """Give the data of a task with these members."""
    return open_task_data(prepared(type("Variant", (Small,), members)))


def test_a_config_without_a_task_is_noted():
    torch = Layer("options", {"framework": "torch"})
    found = prepare([Layer("--set", {"task_options": {"split_seed": 1}}), torch]).notes
    assert found == ("no task is given: training the built-in task digits",)
    assert prepare([Layer("--set", {}), torch]).notes == ()
    assert prepare([Layer("run.yaml", torch.values), Layer("options", {"task": "digits"})]).notes == ()


def test_what_must_be_equal_on_all_workers_is_stated():
    found = opened(eval_data=lambda self: {"inputs": np.zeros((3, 2), np.uint8)})
    assert found.common_values == {
        "size of the training data": 11,
        "inputs of the training data": "float32[2]",
        "targets of the training data": "float32[]",
        "size of the evaluation data": 3,
        "inputs of the evaluation data": "uint8[2]",
    }


def test_a_horovod_with_other_patches_is_noted_and_refused_by_elastic_jobs(monkeypatch):
    """Their workers would crash at the next change of the workers."""
    found = [patches_digest(horovod_patches())]
    monkeypatch.setattr(starting, "require_horovod", lambda framework: build_with(found[-1]))
    assert prepared().notes == ()
    found.append("e" * 12)
    assert ["e" * 12 in note for note in prepared().notes] == [True]
    monkeypatch.setenv("HVDTRAIN_ELASTIC", "h1:1")
    with pytest.raises(HorovodBuildError, match=f"built with patches {'e' * 12}") as error:
        prepared()
    assert (error.value.exit_code, error.value.everywhere) == (3, False)
    assert "build-horovod" in error.value.remedy
    found.pop()
    assert prepared().notes == ()


def test_workers_compare_the_patches_of_their_horovod(monkeypatch):
    """The plan's line of Horovod has no digest."""
    monkeypatch.setattr(starting, "versions_with", lambda backend: {})
    seen = []
    for patches in ("d" * 12, "e" * 12):
        monkeypatch.setattr(starting, "require_horovod", lambda framework, found=patches: build_with(found))
        job = prepared()
        assert patches not in job.build
        seen.append(starting.common_values(job, SimpleNamespace()))
    one, other = seen
    assert {name for name in one if one[name] != other[name]} == {"version of Horovod"}
    assert "d" * 12 in one["version of Horovod"]


def test_data_that_cannot_be_used_is_named():
    with pytest.raises(DataError, match=r"train_data\(\) of task small gave None"):
        opened(train_data=lambda self: None)
    with pytest.raises(DataError, match=r"the training data is empty \(0 samples\)"):
        opened(train_data=lambda self: [])
    with pytest.raises(TaskError, match=r"eval_data\(\) of task small failed: .*, line \d+: KeyError"):
        opened(eval_data=lambda self: {}["train.csv"])


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},  # without PMIx, MPI does not know of the others
        {"WORLD_SIZE": "2", "RANK": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "HOROVOD_CONTROLLER": "gloo"},
    ],
)
def test_a_launch_that_horovod_will_not_see_is_refused_before_it_starts(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(starting, "installed_build", lambda: SimpleNamespace(patches="x", mpi="Open MPI 5"))
    with pytest.raises(EnvironmentFault, match="started 2 processes"):
        prepare([Layer("options", {"framework": "torch"})], Small)


def test_the_launch_is_joined_before_the_task_is_loaded(monkeypatch):
    joined = []
    monkeypatch.setattr(starting, "join_torchrun", lambda: joined.append(True))
    monkeypatch.setattr(starting, "load_task_class", lambda spec: joined.append(spec) or Small)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    prepare([Layer("options", {"framework": "torch", "task": "small"})])
    assert joined == [True, "small"]
