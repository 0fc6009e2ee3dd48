"""Splits without a seed and data that differ between workers: an honest accuracy or an error."""

import socket

import pytest
from data_cases import TASKS
from support.jobs import FRAMEWORKS
from support.pool import Key, call, command, controller_of

HOST = socket.gethostname()
HONEST = pytest.approx(0.5, abs=0.08)
SEEDED = {"torch": ["Sklearn", "Numpy", "Torch"], "tf": ["Sklearn", "TensorFlow"]}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """What two workers say of the data of each task."""
    tasks = ["SetOrder", "Unseeded"]
    case = f"{TASKS.with_name('data_cases.py')}:opened"
    done = call(Key("torch", "mpi", 2), case, tmp_path_factory.mktemp("case"), framework="torch", tasks=tasks)
    assert done.values[0] == done.values[1]
    return done.values[0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_split_without_a_seed_is_the_same_on_all_workers(framework, tmp_path):
    case = f"{TASKS.with_name('data_cases.py')}:accuracies"
    done = call(
        Key(framework, controller_of(framework, 2), 2),
        case,
        tmp_path,
        framework=framework,
        tasks=SEEDED[framework],
    )
    assert done.values[0] == done.values[1]
    assert done.values[0] == [HONEST] * len(SEEDED[framework])


def test_data_that_differ_are_refused_with_index_key_ranks_and_remedy(opened):
    code, text = opened["Unseeded"]
    assert code == 3
    assert f"sample 0 of the training data differs under 'inputs': one value on rank 0 ({HOST}), " in text
    assert f"another on rank 1 ({HOST})" in text
    assert "Do not shard it: hvdtrain shards the data itself. Seed a random split" in text


def test_the_order_of_a_set_is_equal_or_refused(opened):
    """It is equal under a horovodrun that hvdtrain built."""
    if opened["SetOrder"]:
        assert opened["SetOrder"][0] == 3
        assert "sort file names and sets" in opened["SetOrder"][1]


def test_one_worker_that_resumes_and_evaluates(tmp_path):
    """A split that is seeded here continues; one with a generator of its own is refused."""

    def hvdtrain(*words: str, task: str, in_framework: str = "torch"):
        result = command(
            1, "none", in_framework, *words, "--framework", in_framework, "--task", f"{TASKS}:{task}",
            cwd=tmp_path,
        )  # fmt: skip
        return result.returncode, result.output

    assert hvdtrain("--run-dir", "a", "--epochs", "20", task="Numpy")[0] == 0
    assert hvdtrain("--run-dir", "a", "--epochs", "21", "--resume", task="Numpy")[0] == 0
    code, text = hvdtrain("evaluate", "a", task="Numpy", in_framework="tf")
    assert code == 0, text
    assert float(text.partition("accuracy ")[2].split()[0]) == HONEST
    assert hvdtrain("--run-dir", "b", "--epochs", "1", task="Unseeded")[0] == 0
    code, text = hvdtrain("--run-dir", "b", "--epochs", "2", "--resume", task="Unseeded")
    assert code == 2
    assert "the training data changed since checkpoint" in text
    code, text = hvdtrain("evaluate", "b", task="Unseeded")
    assert code == 2
    assert "the evaluation data changed since checkpoint" in text
    code, text = hvdtrain("evaluate", "b", "--on-changed-data", "warn", task="Unseeded")
    assert code == 0, text
    assert "note: the evaluation data changed since checkpoint" in text
